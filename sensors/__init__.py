"""The reference location's sensor: it keeps the harvester alive."""

from dagster import AssetKey

from outbox_plugin.dagster import build_harvester_sensor
from resources import RESOURCES

HARVESTER = AssetKey("harvester")

harvester_sensor = build_harvester_sensor(HARVESTER, topics=["departures"])

__all__ = ["HARVESTER", "RESOURCES", "harvester_sensor"]
