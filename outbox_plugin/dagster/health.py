"""An outbox's status in Dagster's terms: metadata that the UI plots, and results of checks."""

from __future__ import annotations

from dagster import AssetCheckEvaluation, AssetCheckResult, AssetCheckSeverity, AssetKey, MetadataValue

from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.printable import printable
from outbox_plugin.status.health_rules import HealthResult, troubles
from outbox_plugin.status.reader import ShardStatus, Status

Metadata = dict[str, MetadataValue]


def metadata(status: Status) -> Metadata:
    """The status as metadata. The UI plots the numbers over time."""
    shown: Metadata = {
        "records_per_second": MetadataValue.float(sum(shard.records_per_second for shard in status.shards)),
        "published": MetadataValue.int(sum(shard.published for shard in status.shards)),
        "leaders": MetadataValue.int(sum(shard.leader is not None for shard in status.shards)),
    }
    if status.backlog is not None:
        shown["parked_keys"] = MetadataValue.int(status.parked_keys)
        shown["dead_letters"] = MetadataValue.int(status.dead_letters)
        shown["backlog"] = MetadataValue.int(status.backlog)
        shown["lag_seconds"] = MetadataValue.float(status.oldest_seconds or 0.0)
    shown["live_rows_waiting"] = MetadataValue.int(sum(shard.live_rows_waiting for shard in status.shards))
    shown["shards"] = MetadataValue.md(_table(status))
    if said := troubles(status):
        shown["trouble"] = MetadataValue.text(printable(said))
    return shown


def daemon_metadata(daemon: Daemon) -> Metadata:
    """The daemon as metadata: its log, and its process id while it runs."""
    shown: Metadata = {"log": MetadataValue.path(str(daemon.log))}
    if pid := daemon.pid:
        shown["daemon_pid"] = MetadataValue.text(str(pid))  # A number would be plotted.
    return shown


def result(health: HealthResult, shown: Metadata) -> AssetCheckResult:
    """The result of a check that Dagster runs."""
    return AssetCheckResult(
        passed=health.passed,
        severity=_severity(health),
        description=printable(health.explanation),
        metadata={**_explained(health), **shown},
    )


def evaluation(health: HealthResult, asset: AssetKey, check: str) -> AssetCheckEvaluation:
    """The result of a check that the sensor evaluates.

    Args:
        health: what the check has found.
        asset: that is checked.
        check: its name.
    """
    return AssetCheckEvaluation(
        asset_key=asset,
        check_name=check,
        passed=health.passed,
        severity=_severity(health),
        description=printable(health.explanation),
        metadata=_explained(health),
    )


def _severity(health: HealthResult) -> AssetCheckSeverity:
    return AssetCheckSeverity.ERROR if health.severe else AssetCheckSeverity.WARN


def _explained(health: HealthResult) -> Metadata:
    said: Metadata = {"explanation": MetadataValue.text(printable(health.explanation))}
    if health.what_to_do:
        said["what_to_do"] = MetadataValue.text(health.what_to_do)
    return said


def _table(status: Status) -> str:
    head = "| shard | leader | host | pid | term | since | records/s | waiting |\n|---|---|---|---|---|---|---|---|\n"
    rows = []
    for shard in status.shards:
        if leader := shard.leader:
            who = f"{leader.instance} | {leader.host} | {leader.pid} | {leader.leader_id} | {leader.since}"
        else:
            who = "none is heard | | | |"
        who = printable(who)
        rows.append(f"| {shard.shard} | {who} | {shard.records_per_second:.0f} | {_waiting(shard)} |")
    return head + "\n".join(rows)


def _waiting(shard: ShardStatus) -> str:
    live = f", {shard.live_rows_waiting} of them live" if shard.live_first else ""
    return f"{shard.lag_records}{live}" + (", paused" if shard.paused else "")
