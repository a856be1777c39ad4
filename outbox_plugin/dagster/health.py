"""An outbox's status as Dagster shows it: metadata that the UI plots, and a sentence."""

from __future__ import annotations

from dagster import MetadataValue

from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.status import Status

Metadata = dict[str, MetadataValue]


def metadata(status: Status, daemon: Daemon | None = None) -> Metadata:
    """The status as metadata; what is a number is plotted over time."""
    shown: Metadata = {
        "records_per_second": MetadataValue.float(sum(shard.records_per_second for shard in status.shards)),
        "published": MetadataValue.int(sum(shard.published for shard in status.shards)),
        "leaders": MetadataValue.int(sum(shard.leader is not None for shard in status.shards)),
    }
    if status.backlog is not None:
        shown["backlog"] = MetadataValue.int(status.backlog)
        shown["lag_seconds"] = MetadataValue.float(status.oldest_seconds or 0.0)
    shown["shards"] = MetadataValue.md(_table(status))
    if said := troubles(status):
        shown["trouble"] = MetadataValue.text(said)
    if daemon is not None:
        shown["log"] = MetadataValue.path(str(daemon.log))
        if pid := daemon.pid:
            shown["daemon_pid"] = MetadataValue.int(pid)
    return shown


def troubles(status: Status) -> str:
    """What is wrong, in a sentence; empty when nothing is."""
    said = [f"shard {shard.shard}: {shard.trouble}" for shard in status.shards if shard.trouble]
    said += [f"shard {shard.shard} has no leader" for shard in status.shards if shard.leader is None]
    return "; ".join([*status.errors, *said])


def _table(status: Status) -> str:
    head = "| shard | leader | host | pid | term | since | records/s |\n|---|---|---|---|---|---|---|\n"
    rows = []
    for shard in status.shards:
        if leader := shard.leader:
            who = f"{leader.instance} | {leader.host} | {leader.pid} | {leader.leader_id} | {leader.since}"
        else:
            who = "none is heard | | | |"
        rows.append(f"| {shard.shard} | {who} | {shard.records_per_second:.0f} |")
    return head + "\n".join(rows)
