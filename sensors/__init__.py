"""The reference location's sensors: one keeps the harvester alive, one has an asset consume what arrives."""

from dagster import AssetKey

from outbox_plugin.dagster import build_harvester_sensor, build_topic_sensor
from resources import RESOURCES

HARVESTER = AssetKey("harvester")

harvester_sensor = build_harvester_sensor(HARVESTER, topics=["departures"])
# A range is requested when all of the demo's events are there, or when the first of them has waited for a while.
delays_sensor = build_topic_sensor(
    "departures", "carrier_delays", interval_seconds=3, max_records=400_000, max_wait_seconds=5
)

__all__ = ["HARVESTER", "RESOURCES", "delays_sensor", "harvester_sensor"]
