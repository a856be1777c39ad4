"""The sensor that keeps a harvester's daemon alive and reports how it is."""

import time

from dagster import (
    AssetCheckEvaluation,
    AssetCheckSeverity,
    AssetKey,
    AssetObservation,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.dagster.health import metadata, troubles
from outbox_plugin.dagster.resources import HarvesterResource
from outbox_plugin.dagster.supervision import Decision
from outbox_plugin.status import read_status

# A tick that waits starves every other sensor: servers that are away are given up soon.
STATUS_SECONDS = 1.5
HEALTHY = "healthy"


def build_harvester_sensor(
    asset_key: AssetKey,
    *,
    resource_key: str = "harvester",
    name: str = "harvester_sensor",
    interval_seconds: int = 10,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
) -> SensorDefinition:
    """A sensor that keeps the harvester of the resource `resource_key` running.

    Each tick renews the daemon's lease, starts it if it is not there, and reports an observation of `asset_key` (an
    external asset) and its check `healthy`. Turned off, the daemon ends once its lease has run out.
    """

    @sensor(
        name=name,
        minimum_interval_seconds=interval_seconds,
        default_status=default_status,
        required_resource_keys={resource_key},
        description="Keeps the outbox's harvester running, and reports how it is.",
    )
    def keep_harvesting(context: SensorEvaluationContext) -> SensorResult:
        harvester: HarvesterResource = getattr(context.resources, resource_key)
        settings = harvester.settings()
        daemon = Daemon.of(settings)
        decision = daemon.keep_alive(harvester.lease_seconds, time.time())
        if decision is Decision.START:
            context.log.info(f"started the harvester's daemon; its log is {daemon.log}")
        elif decision is Decision.WAIT:
            context.log.warning(f"the harvester's daemon keeps ending, and is started more slowly; see {daemon.log}")
        elif daemon.outdated:
            context.log.info("the daemon that runs has other settings; once its lease has run out, ours follows")
        status = read_status(settings, STATUS_SECONDS)
        trouble = troubles(status)
        if trouble:
            context.log.warning(trouble)
        shown = metadata(status, daemon)
        return SensorResult(
            asset_events=[
                AssetObservation(asset_key, metadata=shown),
                AssetCheckEvaluation(
                    check_name=HEALTHY,
                    asset_key=asset_key,
                    passed=not trouble,
                    severity=AssetCheckSeverity.WARN,
                    metadata={"explanation": trouble or "a leader is heard, and it has no trouble"},
                ),
            ]
        )

    return keep_harvesting
