"""Counts what happens in harvesters, as Prometheus metrics.

One registry serves all harvesters of a process; the label `group` distinguishes their outboxes. Metrics are updated
once per window or transaction. The only work per row is to count topics, where a window has several. The bytes of
values are added up for a hundred rows of a window at most: to look at each takes some per cent of a drain.
"""

from __future__ import annotations

import threading
import time
from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outbox_plugin.core.progress import LATEST_TIME
from outbox_plugin.core.readiness import Readiness, Ready
from outbox_plugin.core.row import OutboxRow, WholeRecord, column, fields_of, topics_of
from outbox_plugin.observe.table_poller import TableState
from outbox_plugin.observe.topic_counter import TopicCounter
from outbox_plugin.relay.events import (
    HarvestEvent,
    KeysHeld,
    RecordsIgnored,
    RowsDeadLettered,
    RowsParked,
    RowsRead,
    TakeoverBegan,
    TermBegan,
    TermFinished,
    TransactionEnded,
    WindowPublished,
    WindowPurged,
)

NO_ERROR = "none"  # A term ended without an error: by a stop, or because another harvester leads.
_STATEMENT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_DELAY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)
_TAKEOVER_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_POSTGRES_EPOCH = 946_684_800  # 2000-01-01 UTC, in seconds since 1970.
_SAMPLED_ROWS = 100
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_TOPIC, _VALUE = map(OutboxRow._fields.index, ("topic", "value"))
_GROUP, _SHARD = ["group"], ["group", "shard"]


class HarvesterMetrics:
    """The metrics of all harvesters, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._kept: list[tuple[Counter | Histogram, list[str]]] = []  # With their labels. Gauges are cleared anyway.
        self._groups = threading.Lock()  # Guards the two below.
        self._users: dict[str, int] = {}  # By group, its harvesters of this process.
        self._gone: set[str] = set()

        def counter(name: str, what: str, *labels: str) -> Counter:
            made = Counter(f"outbox_{name}", what, [*_GROUP, *labels], registry=registry)
            self._kept.append((made, [*_GROUP, *labels]))
            return made

        def gauge(name: str, what: str, labels: list[str]) -> Gauge:
            return Gauge(f"outbox_{name}", what, labels, registry=registry)

        def seconds(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"outbox_{name}_seconds", what, _GROUP, buckets=buckets, registry=registry)
            self._kept.append((made, _GROUP))
            return made

        self.sent = counter("sent_messages", "Records committed to Kafka, by topic.", "messaging_destination_name")
        self.sent_bytes = counter(
            "sent_bytes", "Bytes of the values of these records, uncompressed.", "messaging_destination_name"
        )
        self.transactions = seconds(
            "transaction_duration", "Kafka transactions that were committed.", _STATEMENT_BUCKETS
        )
        self.failed = counter(
            "failed_transactions", "Kafka transactions that were not committed, or of unknown outcome.", "error_type"
        )
        self.delay = seconds(
            "delivery_delay", "From the creation of a window's first row to its commit in Kafka.", _DELAY_BUCKETS
        )
        self.reads = seconds("read_duration", "Reads of the outbox, also those that find nothing.", _STATEMENT_BUCKETS)
        self.purges = seconds("purge_duration", "Deletions of published rows.", _STATEMENT_BUCKETS)
        self.purged = counter("purged_rows", "Rows deleted after they were published.")
        self.recovered = counter("recovered_rows", "Rows deleted that the last leader had published.")
        self.takeovers = seconds(
            "takeover_duration", "From being a candidate to leading, of takeovers that succeeded.", _TAKEOVER_BUCKETS
        )
        self.terms_ended = counter("ended_terms", "Terms that ended, by the error that ended them.", "error_type")
        self.parked = counter("parked_rows", "Rows that Kafka refused, and whose keys wait.")
        self.dead_lettered = counter("dead_lettered_rows", "Rows that Kafka refused, and that became dead letters.")
        self.holds = counter("held_topics", "Times that a topic or key was held back, to be tried again.")
        self.ignored = counter("ignored_records", "Progress records that no harvester of the outbox has signed.")
        self.is_leader = gauge("is_leader", "Harvesters of this process that lead the shard: 0 or 1.", _SHARD)
        self.ready = gauge("ready", "Harvesters of this process that are ready, as /readyz says.", _SHARD)
        self.waiting = gauge("waiting_rows", "Rows to be sent; at most 10,000 of all shards are counted.", _SHARD)
        self.oldest = gauge("oldest_row_age_seconds", "Age of the oldest row that is to be sent, else 0.", _SHARD)
        self.parked_keys = gauge("parked_keys", "Keys and topics that wait behind a row that Kafka refused.", _GROUP)
        self.dead_letters = gauge("dead_letters", "Dead letters; at most 10,000 are counted.", _GROUP)
        self.dead_rows = gauge("table_dead_rows", "Dead rows of the table, as Postgres's statistics have them.", _GROUP)
        self.table_bytes = gauge("table_bytes", "Bytes of the table, with its indexes.", _GROUP)
        self.answered_at = gauge(
            "table_answer_timestamp_seconds", "When Postgres last said how many rows, keys and letters wait.", _GROUP
        )

    def clear_gauges(self) -> None:
        """Clear the gauges that each scrape sets again: their shards and outboxes may no longer exist.

        Also removes the series of groups that are gone.
        """
        self._remove_gone()
        for each in (self.is_leader, self.ready, self.waiting, self.oldest, self.parked_keys, self.dead_letters):
            each.clear()
        for each in (self.dead_rows, self.table_bytes, self.answered_at):
            each.clear()

    def use(self, group: str) -> None:
        """A harvester of the group begins to count."""
        with self._groups:
            self._users[group] = self._users.get(group, 0) + 1
            self._gone.discard(group)

    def leave(self, group: str) -> None:
        """A harvester of the group counts no more."""
        with self._groups:
            self._users[group] -= 1
            if not self._users[group]:
                del self._users[group]

    def forget(self, group: str) -> None:
        """The outbox of the group no longer exists. Its series are removed once no harvester of the group counts."""
        with self._groups:
            self._gone.add(group)

    def _remove_gone(self) -> None:
        """Remove all such groups' series in one pass: there may be thousands of groups."""
        with self._groups:
            if not (gone := self._gone - self._users.keys()):
                return
            for metric, labels in self._kept:
                for series in {
                    tuple(sample.labels[label] for label in labels)
                    for family in metric.collect()
                    for sample in family.samples
                    if sample.labels["group"] in gone
                }:
                    metric.remove(*series)
            self._gone -= gone


class GroupMetrics:
    """The metrics of the harvesters of one group in this process. Any thread may call it."""

    def __init__(self, metrics: HarvesterMetrics, group: str) -> None:
        self._all = metrics
        self._group = group
        metrics.use(group)
        self._sent = TopicCounter(metrics.sent, group)
        self._sent_bytes = TopicCounter(metrics.sent_bytes, group)
        self._candidates: dict[int, float] = {}
        self._transactions = metrics.transactions.labels(group)
        self._delay = metrics.delay.labels(group)
        self._reads = metrics.reads.labels(group)
        self._purges = metrics.purges.labels(group)
        self._purged = metrics.purged.labels(group)
        self._published_windows = count()

    def close(self) -> None:
        """Count no more."""
        self._all.leave(self._group)

    def observe(self, event: HarvestEvent) -> None:
        """Count an event. The frequent kinds are checked first."""
        match event:
            case RowsRead():
                self._reads.observe(event.seconds)
            case WindowPublished():
                self._published(event)
            case TransactionEnded(error_type=None):
                self._transactions.observe(event.seconds)
            case TransactionEnded():
                self._all.failed.labels(self._group, event.error_type).inc()
            case WindowPurged():
                self._purges.observe(event.seconds)
                self._purged.inc(event.rows)
            case _:
                self._observe_rare(event)

    def _observe_rare(self, event: HarvestEvent) -> None:
        match event:
            case TakeoverBegan():
                self._candidates[event.shard] = time.monotonic()
            case TermBegan():
                self._all.recovered.labels(self._group).inc(event.recovered)
                if (began := self._candidates.pop(event.shard, None)) is not None:
                    self._all.takeovers.labels(self._group).observe(time.monotonic() - began)
            case TermFinished():
                self._candidates.pop(event.shard, None)
                self._all.terms_ended.labels(self._group, event.error_type or NO_ERROR).inc()
            case RowsParked():
                self._all.parked.labels(self._group).inc(len(event.bad))
            case RowsDeadLettered():
                self._all.dead_lettered.labels(self._group).inc(len(event.bad))
            case KeysHeld():
                self._all.holds.labels(self._group).inc(len(event.keys))
            case RecordsIgnored():
                self._all.ignored.labels(self._group).inc(event.count)
            case _:
                pass

    def _published(self, event: WindowPublished) -> None:
        if not event.rows:
            return
        for topic, records in _records_by_topic(event.records).items():
            self._sent.add(topic, records)
        for topic, size in _estimated_bytes(event.records, next(self._published_windows)).items():
            self._sent_bytes.add(topic, size)
        created = event.records[0].create_time
        if abs(created) <= LATEST_TIME:  # Infinite times, which Postgres allows, have no delay.
            self._delay.observe(max(0.0, time.time() - _POSTGRES_EPOCH - created / 1e6))

    def show_table(self, table: TableState, answered_at: float) -> None:
        """Show the state of the tables. `answered_at`: when Postgres answered, in seconds since 1970."""
        self._all.answered_at.labels(self._group).set(answered_at)
        self._all.parked_keys.labels(self._group).set(table.parked_keys)
        if table.dead_letters is not None:
            self._all.dead_letters.labels(self._group).set(table.dead_letters)
        if table.size is not None:
            self._all.dead_rows.labels(self._group).set(table.size.dead_rows)
            self._all.table_bytes.labels(self._group).set(table.size.total_bytes)
        for shard in range(table.shards) if table.waiting is not None else ():
            waiting = table.waiting.get(shard) if table.waiting else None
            self._all.waiting.labels(self._group, shard).set(waiting.rows if waiting else 0)
            age = (waiting.oldest_seconds if waiting else None) or 0.0
            self._all.oldest.labels(self._group, shard).set(max(0.0, age))

    def show_shard(self, shard: int, *, leads: bool, readiness: Readiness) -> None:
        """Show the state of one shard of one harvester.

        Args:
            shard: its number.
            leads: whether the harvester leads it.
            readiness: whether the harvester is ready, as far as the shard is concerned.
        """
        self._all.is_leader.labels(self._group, shard).inc(leads)
        self._all.ready.labels(self._group, shard).inc(isinstance(readiness, Ready))


def _records_by_topic(records: Sequence[OutboxRow]) -> Mapping[str, int]:
    """How many records each topic has."""
    topics = topics_of(records)
    return {topic: len(records) for topic in topics} if len(topics) == 1 else Counts(column(records, "topic"))


def _estimated_bytes(records: Sequence[OutboxRow], window: int) -> Mapping[str, int]:
    """About how many bytes the values of each topic's records have.

    Of many records, a sample of some that follow one another stands for all. Where it begins differs from window to
    window, by steps of the golden ratio: in the long run each place comes equally often, and no period of the records
    meets that of the steps.

    Args:
        records: of a window.
        window: the window's number.
    """
    parts = -(-len(records) // _SAMPLED_ROWS)
    part = int(window * _GOLDEN_RATIO % 1 * parts)
    sampled = range(part * len(records) // parts, (part + 1) * len(records) // parts)
    fields, sizes = fields_of(records), Counts[str]()
    for index in sampled:  # To copy a slice would at times take the C library a millisecond.
        sizes[fields[index][_TOPIC]] += _value_bytes(fields[index][_VALUE])
    return {topic: size * len(records) // len(sampled) for topic, size in sizes.items()}


def _value_bytes(value: Any) -> int:
    """The bytes of a value that was sent. Text of ASCII is not encoded, which would take memory, too."""
    body = value.value if isinstance(value, WholeRecord) else value
    if not body:
        return 0
    return len(body.encode()) if isinstance(body, str) and not body.isascii() else len(body)
