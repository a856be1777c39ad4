"""The sensor that keeps a harvester's daemon alive and reports how it is."""

import time
from collections.abc import Sequence

import psutil
from dagster import (
    AssetCheckEvaluation,
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    DefaultSensorStatus,
    MetadataValue,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from outbox_plugin.dagster.assets import check_topic_names, topic_key
from outbox_plugin.dagster.cursor import Cursor, Moved, Use
from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.dagster.health import Metadata, daemon_metadata, evaluation, metadata
from outbox_plugin.dagster.resources import HarvesterResource
from outbox_plugin.dagster.supervision import Decision, check_lease
from outbox_plugin.dagster.topics import topic_ends
from outbox_plugin.printable import printable
from outbox_plugin.status.health_rules import Limits, dead_letters, health
from outbox_plugin.status.reader import read_status
from outbox_plugin.threads.deadline import DeadlineFuture

# A tick that waits starves every other sensor: servers that are away are given up soon.
STATUS_SECONDS = 1.5
HEALTHY, NO_DEAD_LETTERS = "healthy", "no_dead_letters"
Event = AssetObservation | AssetMaterialization | AssetCheckEvaluation


def build_harvester_sensor(
    asset_key: AssetKey,
    *,
    topics: Sequence[str] = (),
    resource_key: str = "harvester",
    name: str = "harvester_sensor",
    interval_seconds: int = 10,
    limits: Limits | None = None,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
) -> SensorDefinition:
    """A sensor that keeps the harvester of the resource `resource_key` running.

    Each tick renews the daemon's lease, starts it if it is not there, and reports an observation of `asset_key` (an
    external asset) and its checks `healthy` and `no_dead_letters`, whose severity `limits` decide. Of `topics` it
    reports those that have moved: as a materialization of `kafka/<topic>`, and once more, as an observation, when they
    have stopped to. Turned off, the daemon ends once its lease has run out. With a resource of mode "observe", it
    starts nothing. A tick ends within 2 s, whatever the servers do. A tick fails if the resource's lease is so short
    that the daemon would end between ticks.

    Raises:
        InvalidSetting: `topics` is a text, or a topic's name is none.
    """
    check_topic_names(topics)
    bounds = limits or Limits()

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
        deadline = time.monotonic() + STATUS_SECONDS
        ends = DeadlineFuture(lambda: topic_ends(settings, topics, deadline)) if topics else None
        daemon = Daemon.of(settings)
        if harvester.mode == "supervise":
            check_lease(harvester.lease_seconds, interval_seconds)
            _supervise(context, daemon, harvester.lease_seconds)
        status = read_status(settings, max(0.1, deadline - time.monotonic()))
        now = time.time()
        before = Cursor.parse(context.cursor)
        judged = health(status, bounds, now - before.troubled_since if before.troubled_since else 0.0)
        if not judged.passed:
            context.log.warning(printable(judged.explanation))
        found, _ = ends.result(deadline, "Kafka") if ends else (None, None)  # If it is away, the status says so.
        cursor, told = before.moved(found or {}, now)
        use = _use_of(daemon)
        cursor, cpu_percent = cursor.used(use, now)
        cursor = cursor.after(status, now, troubled=not judged.passed)
        shown = {
            **metadata(status),
            "takeovers": MetadataValue.int(cursor.takeovers),
            "duplicates_suppressed": MetadataValue.int(cursor.suppressed),
        }
        if harvester.mode == "supervise":
            shown |= daemon_metadata(daemon)
        if use is not None:
            shown["memory_megabytes"] = MetadataValue.float(use.memory_bytes / 1e6)
        if cpu_percent is not None:
            shown["cpu_percent"] = MetadataValue.float(cpu_percent)
        letters = dead_letters(status, bounds)
        events: list[Event] = [
            AssetObservation(asset_key, metadata=shown),
            evaluation(judged, asset_key, HEALTHY),
            evaluation(letters, asset_key, NO_DEAD_LETTERS),
        ]
        events += [_told(topic, moved) for topic, moved in told.items()]
        return SensorResult(skip_reason=judged.explanation, asset_events=events, cursor=cursor.encode())

    return keep_harvesting


def _supervise(context: SensorEvaluationContext, daemon: Daemon, lease_seconds: float) -> None:
    decision = daemon.keep_alive(lease_seconds, time.time())
    if decision is Decision.START:
        context.log.info(f"started the harvester's daemon; its log is {daemon.log}")
    elif decision is Decision.WAIT:
        context.log.warning(f"the harvester's daemon keeps ending, and is started more slowly; see {daemon.log}")
    elif daemon.outdated:
        context.log.info("the daemon that runs has other settings; once its lease has run out, ours follows")


def _use_of(daemon: Daemon) -> Use | None:
    """What the daemon uses; None where none runs on this host."""
    pid = daemon.pid
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return Use(pid, times.user + times.system, process.memory_info().rss)
    except psutil.Error:  # It has just ended.
        return None


def _told(topic: str, moved: Moved) -> Event:
    shown: Metadata = {
        "last_offset": MetadataValue.int(moved.offset),
        "new_offsets": MetadataValue.int(moved.by),
        "offsets_per_second": MetadataValue.float(moved.per_second),
    }
    key = topic_key(topic)
    return AssetMaterialization(key, metadata=shown) if moved.by else AssetObservation(key, metadata=shown)
