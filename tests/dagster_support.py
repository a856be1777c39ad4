"""What tests of the plugin in Dagster share: its resources, its daemon's processes, and what a tick reports."""

from __future__ import annotations

import time

import psutil
from dagster import (
    AssetCheckEvaluation,
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    DagsterInstance,
    SensorDefinition,
    build_sensor_context,
)

from outbox_plugin import Settings
from outbox_plugin.dagster import HarvesterResource, OutboxResource, build_harvester_sensor
from outbox_plugin.dagster.daemon import Daemon

HARVESTER = AssetKey("harvester")


def resources(settings: Settings, lease_seconds: float = 60.0) -> tuple[OutboxResource, HarvesterResource]:
    """The outbox and its harvester as a user would declare them."""
    outbox = OutboxResource(
        dsn=settings.dsn.get_secret_value(), bootstrap_servers=settings.bootstrap_servers, group=settings.group
    )
    return outbox, HarvesterResource(outbox=outbox, lease_seconds=lease_seconds)


def daemons(daemon: Daemon) -> list[int]:
    """The processes that are this daemon."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if str(daemon.folder) in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


class Ticks:
    """The harvester's sensor, tick by tick, each with the cursor that the last one left."""

    def __init__(self, harvester: HarvesterResource, sensor: SensorDefinition | None = None) -> None:
        self._harvester = harvester
        self._sensor = sensor or build_harvester_sensor(HARVESTER)
        self.cursor: str | None = None
        self.seconds = 0.0  # How long the last tick took.
        self.events: list[AssetObservation | AssetMaterialization | AssetCheckEvaluation] = []

    def tick(self) -> tuple[AssetObservation, AssetCheckEvaluation]:
        """Make one tick. Returns what it reports of the harvester; `events` has all that it reports."""
        with (
            DagsterInstance.ephemeral() as instance,
            build_sensor_context(
                instance=instance, cursor=self.cursor, resources={"harvester": self._harvester}
            ) as context,
        ):
            began = time.monotonic()
            done = self._sensor.evaluate_tick(context)
            self.seconds = time.monotonic() - began
        self.cursor, self.events = done.cursor, list(done.asset_events)
        observation, check = self.events[:2]
        assert isinstance(observation, AssetObservation)
        assert isinstance(check, AssetCheckEvaluation)
        return observation, check


def reported(settings: Settings) -> tuple[AssetObservation, AssetCheckEvaluation]:
    """What a first tick reports of the harvester."""
    return Ticks(resources(settings)[1]).tick()
