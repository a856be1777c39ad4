"""An attacker who may read and write the control topics, but does not know the secret."""

from __future__ import annotations

import random
from dataclasses import replace

from outbox_plugin.core.leader_heartbeat import LARGEST_LAYOUT, LeaderHeartbeat, Phase
from outbox_plugin.core.progress import ProgressRecord, Publication
from tests.simulation.kafka import Broker, ProgressEntry
from tests.simulation.postgres import Database, Store


def write_to_control_topics(rng: random.Random, broker: Broker, database: Database) -> str:
    """Write a record to each control topic; returns of what kinds."""
    kinds = {"copies": _copy, "copies the last": _copy_the_last, "forges": _forge}
    kind = rng.choice(sorted(kinds))
    for entries in broker.progress.values():
        if entries:
            entries.append(kinds[kind](rng, entries, database))
    for group in broker.groups:
        for shard, records in list(group.heartbeats.items()):
            record = rng.choice(records[-100:])
            heartbeat = LeaderHeartbeat.parse(record.value)
            if kind == "forges" and heartbeat is not None:
                phase: Phase = rng.choice(("leader", "resigned"))
                layout = rng.choice((heartbeat.layout, LARGEST_LAYOUT))
                forged = replace(heartbeat, phase=phase, layout=layout, beat=heartbeat.beat + 1_000)
                record = record._replace(value=forged.encode())
            group.write(shard, record.key, record.value, record.headers)
    return kind


def _copy(rng: random.Random, entries: list[ProgressEntry], _: Database) -> ProgressEntry:
    return rng.choice(entries)._replace(transaction=None)


def _copy_the_last(_: random.Random, entries: list[ProgressEntry], __: Database) -> ProgressEntry:
    """Which may be in an open transaction, or in one that was aborted."""
    return entries[-1]._replace(transaction=None)


def _forge(_: random.Random, entries: list[ProgressEntry], database: Database) -> ProgressEntry:
    """A record that names all rows there are as published, in a term to come."""
    rows = [Store.as_read(database.rows[id_], database.next_xid) for id_ in sorted(database.rows)]
    record = ProgressRecord.parse(entries[-1].value)
    forged = replace(record, publications=(Publication.of(rows),), term=record.term + 1)
    return ProgressEntry(None, forged.encode(), entries[-1].headers)
