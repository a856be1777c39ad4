"""The sensor that keeps a harvester's daemon running and reports its state."""

import time
from collections.abc import Sequence
from dataclasses import replace

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

from outbox_plugin.dagster.cursor import Cursor, Moved, Use
from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.dagster.daemon_supervision import DaemonAction, check_lease
from outbox_plugin.dagster.health import Metadata, daemon_metadata, evaluation, metadata
from outbox_plugin.dagster.resources import HarvesterResource
from outbox_plugin.dagster.shared_assets import OUTBOX, judge_sharing, observed_outboxes, outbox_name
from outbox_plugin.dagster.topic import Topic, as_topics
from outbox_plugin.dagster.topic_end_offsets import topic_ends, topic_uri
from outbox_plugin.dagster.translator import DagsterOutboxTranslator, topic_props
from outbox_plugin.printable import printable
from outbox_plugin.status.health_rules import Limits, dead_letters, health
from outbox_plugin.status.reader import read_status
from outbox_plugin.threads.deadline_future import DeadlineFuture

# A tick that waits holds up every other sensor, so a tick gives up soon on a server that is away.
STATUS_SECONDS = 1.5
HEALTHY, NO_DEAD_LETTERS = "healthy", "no_dead_letters"
Event = AssetObservation | AssetMaterialization | AssetCheckEvaluation


def build_harvester_sensor(
    asset_key: AssetKey,
    *,
    topics: Sequence[Topic | str] = (),
    resource_key: str = "harvester",
    name: str = "harvester_sensor",
    interval_seconds: int = 10,
    limits: Limits | None = None,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
    translator: DagsterOutboxTranslator | None = None,
) -> SensorDefinition:
    """A sensor that keeps the harvester of the resource `resource_key` running.

    Each tick renews the daemon's lease, starts the daemon if it is not there, observes `asset_key`, and evaluates the
    asset's checks `healthy` and `no_dead_letters`. It materializes the asset of each topic that has new records, by
    default `kafka/<topic>`, and observes it once when there are no more. A tick ends within 2 s, even if a server is
    away. A tick fails if the daemon's lease is so short that the daemon would end between ticks. When the sensor is
    turned off, the daemon ends once its lease has run out.

    Args:
        asset_key: the harvester's external asset.
        topics: the topics that the sensor reports on, as their names or as they were declared.
        resource_key: names the `HarvesterResource`. With its mode "observe", the sensor starts no daemon.
        name: the sensor's.
        interval_seconds: the time between two ticks.
        limits: decide how severe a failure of a check is.
        default_status: whether the sensor runs from the start.
        translator: the one that made the topics' assets; it has their keys.

    Raises:
        InvalidSetting: `topics` is no list, or a name is not one that Kafka allows.
    """
    translate = (translator or DagsterOutboxTranslator()).get_asset_spec
    keys = {topic.name: translate(topic_props(topic)).key for topic in as_topics(topics)}
    bounds = limits or Limits()

    @sensor(
        name=name,
        minimum_interval_seconds=interval_seconds,
        default_status=default_status,
        required_resource_keys={resource_key},
        description="Keeps the outbox's harvester running, and reports its state.",
    )
    def keep_harvesting(context: SensorEvaluationContext) -> SensorResult:
        harvester: HarvesterResource = getattr(context.resources, resource_key)
        settings = harvester.settings()
        deadline = time.monotonic() + STATUS_SECONDS
        ends = DeadlineFuture(lambda: topic_ends(settings, list(keys), deadline)) if keys else None
        daemon = Daemon.of(settings)
        is_new = False
        if harvester.mode == "supervise":
            check_lease(harvester.lease_seconds, interval_seconds)
            is_new = _supervise(context, daemon, harvester.lease_seconds)
        status = read_status(settings, max(0.1, deadline - time.monotonic()))
        now = time.time()
        before = Cursor.parse(context.cursor)
        healthy = health(status, bounds, now - before.troubled_since if before.troubled_since else 0.0)
        if is_new and not healthy.passed:
            healthy = replace(healthy, explanation=f"a harvester has just been started; {healthy.explanation}")
        ours = outbox_name(settings)
        healthy = judge_sharing(healthy, observed_outboxes(context.instance, asset_key), ours)
        if not healthy.passed:
            context.log.warning(printable(healthy.explanation))
        topic_offsets, unknown = ends.result(deadline, "Kafka") if ends else (None, None)
        if unknown and not status.errors:  # The status has the error of a server that is away.
            context.log.warning(printable(f"where the topics end is not known, so nothing is said of them: {unknown}"))
        cursor, moves = before.moved(topic_offsets or {}, now)
        use = _use_of(daemon)
        cursor, cpu_percent = cursor.used(use, now)
        cursor = cursor.after(status, now, troubled=not healthy.passed)
        shown = {OUTBOX: MetadataValue.text(ours)} | metadata(status) | _cursor_metadata(cursor)
        if harvester.mode == "supervise":
            shown |= daemon_metadata(daemon)
        shown |= _use_metadata(use, cpu_percent)
        letters = dead_letters(status, bounds)
        events: list[Event] = [
            AssetObservation(asset_key, metadata=shown),
            evaluation(healthy, asset_key, HEALTHY),
            evaluation(letters, asset_key, NO_DEAD_LETTERS),
        ]
        events += [_topic_event(keys[topic], topic_uri(settings, topic), move) for topic, move in moves.items()]
        return SensorResult(skip_reason=healthy.explanation, asset_events=events, cursor=cursor.encode())

    return keep_harvesting


def _supervise(context: SensorEvaluationContext, daemon: Daemon, lease_seconds: float) -> bool:
    """Keep the daemon alive. Returns whether it was started now."""
    decision = daemon.keep_alive(lease_seconds, time.time())
    if decision is DaemonAction.START:
        context.log.info(f"started the harvester's daemon; its log is {daemon.log}")
    elif decision is DaemonAction.WAIT:
        context.log.warning(
            "the harvester's daemon was started a moment ago, and does not run: it is still starting, or keeps ending; "
            f"the longer it does, the longer are the pauses between its starts; see {daemon.log}"
        )
    elif daemon.outdated:
        context.log.warning(
            "the running daemon has other settings: it ends with its lease, and ours starts then; if it does not end, "
            "another code location or checkout on this host asks for it: give both the same settings"
        )
    return decision is DaemonAction.START


def _use_of(daemon: Daemon) -> Use | None:
    """The daemon's CPU and memory; None where no daemon runs on this host."""
    pid = daemon.pid
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return Use(pid, times.user + times.system, process.memory_info().rss)
    except psutil.Error:  # It has just ended.
        return None


def _cursor_metadata(cursor: Cursor) -> Metadata:
    return {
        "takeovers": MetadataValue.int(cursor.takeovers),
        "recovered_rows": MetadataValue.int(cursor.recovered_rows),
    }


def _use_metadata(use: Use | None, cpu_percent: float | None) -> Metadata:
    shown: Metadata = {}
    if use is not None:
        shown["memory_megabytes"] = MetadataValue.float(use.memory_bytes / 1e6)
    if cpu_percent is not None:
        shown["cpu_percent"] = MetadataValue.float(cpu_percent)
    return shown


def _topic_event(key: AssetKey, uri: str, moved: Moved) -> Event:
    shown: Metadata = {
        "dagster/uri": MetadataValue.text(uri),
        "last_offset": MetadataValue.int(moved.offset),
        "new_offsets": MetadataValue.int(moved.by),
        "offsets_per_second": MetadataValue.float(moved.per_second),
    }
    return AssetMaterialization(key, metadata=shown) if moved.by else AssetObservation(key, metadata=shown)
