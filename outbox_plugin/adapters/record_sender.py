"""Produces rows as Kafka records, and finds out which of them Kafka refuses for what they are.

A row is refused at once, for its headers, its size or its topic, or its delivery fails. A batch that is too large fails
as a whole. Then the topic's records are sent in smaller and smaller groups, until the record that is too large fails
alone. A failure of an outage (a time-out, a broker that is away) is never a refusal.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_clients import FORBIDDEN_TOPIC, REQUEST_TIMEOUT_SECONDS
from outbox_plugin.adapters.writable_topics import UnwritableTopics, WritableTopics
from outbox_plugin.core.record_size import record_body_bytes
from outbox_plugin.core.row import (
    Misfit,
    OutboxRow,
    TooLarge,
    WholeRecord,
    column,
    fields_of,
    length_of,
    topics_of,
)
from outbox_plugin.core.row_faults import fault_of, faults_of, header_names_are_plain
from outbox_plugin.core.whole_record import as_time
from outbox_plugin.errors import Away, Refusal, RowsRefused, SchemaMissing, TopicsAway
from outbox_plugin.settings import Settings

_POLL_SECONDS = 0.5
CLOCK_SECONDS = 5.0  # How long a topic that refuses our clock's time is not written to.
_ANY_PARTITION, _NOW = -1, 0  # With these, librdkafka chooses.
_SMALLER = {None: 65_536, 65_536: 4_096, 4_096: 0, 0: 0}  # Bytes of a topic that are sent together; 0: one record.
# Of records that were purged because another delivery failed.
_PURGED = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
_INVALID = {KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG}
_UNTIMELY = {KafkaError.INVALID_TIMESTAMP, *_INVALID}


@dataclass(frozen=True, slots=True)
class Deliveries:
    """What is known of the last records that were produced, as far as they failed.

    Args:
        refusals: why rows are refused for what they are, by id.
        failures: the errors of deliveries, except those of records that were purged because another one failed.
        failed: the rows whose delivery failed for another reason than what they are.
        narrowed: whether records of some topic are sent in smaller groups next time.
        too_large: the topics of which a record, or a batch of records, was too large.
        invalid: those refused rows whose records a broker calls invalid.
        off_clock: what a broker says of our clock, by the topic.
    """

    refusals: dict[int, Refusal] = field(default_factory=dict)
    failures: tuple[KafkaError, ...] = ()
    failed: frozenset[int] = frozenset()
    narrowed: bool = False
    too_large: frozenset[str] = frozenset()
    invalid: frozenset[int] = frozenset()
    off_clock: dict[str, str] = field(default_factory=dict)


class RecordSender:
    """Produces rows, and remembers the results of the last ones until `reset`."""

    def __init__(self, reserved: Callable[[str], str | None], should_wait: Callable[[], bool] = lambda: True) -> None:
        """Nothing is sent yet.

        Args:
            reserved: returns why a topic is not for events; None where it is.
            should_wait: returns whether waiting for an answer still makes sense; called now and then.
        """
        self._topics = WritableTopics(reserved, should_wait=should_wait)
        self._touched: tuple[set[str], set[str]] = set(), set()  # The topics of the last records, and of those before.
        self._limits: dict[str, int] = {}
        self._searched: set[str] = set()  # Topics that are limited to find out whose timestamp a broker refuses.
        self._rows: Sequence[OutboxRow] = ()
        self._group: list[OutboxRow] = []  # Rows of limited topics since the last flush.
        self._group_bytes = 0
        self._are_groups_answered = True
        self._failed_reports: list[tuple[KafkaError, str, bytes | None, bytes | None]] = []
        self._has_met_bad_rows = False
        self._refusals: dict[int, Refusal] = {}
        self._failures: list[KafkaError] = []
        self._failed: set[int] = set()
        self._narrowed = False
        self._too_large: set[str] = set()
        self._invalid: set[int] = set()
        self._too_large_alone: set[int] = set()
        self._off_clock: dict[str, str] = {}
        self._counted: dict[str, int | None] = {}  # Partitions of topics that were looked up again for these records.

    def on_delivery(self, error: KafkaError | None, message: Message) -> None:
        """Take in a delivery report of the producer."""
        if error is not None:
            self._failed_reports.append((error, str(message.topic()), message.key(), message.value()))

    @property
    def refusals(self) -> dict[int, Refusal]:
        """Why rows among the last ones are refused for what they are, as far as that is known."""
        return dict(self._refusals)

    @property
    def any_failed(self) -> bool:
        """Whether a delivery has failed since `produce` began."""
        return bool(self._failed_reports or self._failures)

    def check_topics(self, producer: Producer, rows: Sequence[OutboxRow]) -> None:
        """Make sure that all topics of `rows` can be written to now; nothing may be produced before that.

        Raises:
            RowsRefused: topics of some rows are not for events, or do not exist.
            TopicsAway: some topics cannot be written to now; try again in a moment.
            LogUnavailable: Kafka does not answer.
        """
        verdict = self.unwritable_topics(producer, rows)
        if verdict.refused:
            raise RowsRefused(refused_by_topic(rows, verdict), verdict.away)
        if verdict.away:
            raise TopicsAway(verdict.away)

    def check_rows(self, rows: Sequence[OutboxRow]) -> None:
        """Check that each of `rows` can become a record, as far as that shows before it is handed to the producer.

        A row that is refused inside a transaction costs the transaction and its producer. The check costs a fifth of a
        microsecond for each row, and most outboxes never have a bad row: it begins after the first bad row.

        Raises:
            RowsRefused: some rows cannot.
        """
        if self._has_met_bad_rows and (faults := faults_of(rows)):
            raise RowsRefused({id_: Refusal(fault) for id_, fault in faults.items()})

    def unwritable_topics(self, producer: Producer, rows: Sequence[OutboxRow]) -> UnwritableTopics:
        """Which topics of `rows` cannot be written to now.

        Raises:
            LogUnavailable: Kafka does not answer.
            SchemaMissing: a topic is not a text. Such a row has no ordering key that could be parked, so a user must
                correct the table.
        """
        topics = set(topics_of(rows))
        if not all(isinstance(topic, str) for topic in topics):
            bad = next(row for row in rows if not isinstance(row.topic, str))
            raise SchemaMissing(f"row {bad.id}: {fault_of(bad)}; the column kafka_topic must be a TEXT, NOT NULL")
        self._touched = topics, self._touched[0]
        return self._topics.unwritable(producer, topics)

    def without_leader(self, producer: Producer) -> bool:
        """Whether a topic of the last records, or of those before them, has a partition that no broker leads.

        Such a topic is looked up again before the next record.
        """
        return self._topics.without_leader(producer, set.union(*self._touched))

    def give_up_silent(self, producer: Producer, seconds: float) -> bool:
        """Purge all records if a topic of theirs, or of those before them, has had a replica out of sync for long.

        The topics that have not acknowledged their records may be away from now on. After a purge, the transaction
        cannot be committed.

        Args:
            producer: has the records.
            seconds: for how long leaders and replicas in sync must have been the same. `without_leader` looks at them.

        Returns:
            Whether the records were purged.
        """
        if not self._topics.stays_out_of_sync(set.union(*self._touched), seconds):
            return False
        producer.purge()
        producer.flush(_POLL_SECONDS)
        self._topics.silent({topic for error, topic, *_ in self._failed_reports if error.code() in _PURGED})
        return True

    def acknowledged(self) -> None:
        """Take in that all of the last records were acknowledged."""
        self._topics.acknowledged(self._touched[0])
        self.end_search()

    def end_search(self) -> None:
        """Send records of a topic together again after a search for those whose timestamps a broker refuses."""
        while self._searched:
            self._limits.pop(self._searched.pop(), None)

    def reset(self) -> None:
        """Forget the results of the last records. Call it before the next ones are checked or produced."""
        self._rows, self._group, self._group_bytes, self._are_groups_answered = (), [], 0, True
        self._failed_reports, self._refusals, self._failures, self._failed = [], {}, [], set()
        self._narrowed, self._too_large = False, set()
        self._invalid, self._too_large_alone, self._off_clock = set(), set(), {}
        self._counted = {}
        self._topics.begin()

    def produce(self, producer: Producer, rows: Sequence[OutboxRow]) -> None:
        """Hand `rows` to the producer in their order, except those that are refused at once. Call `reset` before.

        Raises:
            KafkaException: the producer does not take a record, for a reason that is not the row's.
        """
        self._rows = rows
        produce, limits = producer.produce, self._limits
        examine = bool(limits) or not header_names_are_plain(rows)
        for fields in fields_of(rows):
            id_, created, topic, key, value, names, texts, _ = fields
            if (examine or key is None or created is None) and (fault := fault_of(OutboxRow(*fields))):
                self._refusals[id_] = Refusal(fault)
                continue
            partition, timestamp = _ANY_PARTITION, _NOW
            if type(value) is WholeRecord:
                key, value, partition, timestamp = _as_produced(value)
                if refusal := self._misplaced(producer, topic, partition):
                    self._refusals[id_] = refusal
                    continue
            if limits and topic in limits:
                self._make_room(producer, OutboxRow(*fields))
            try:
                if len(names) == 1 == len(texts):  # The usual case, and faster than the general one.
                    headers = [(names[0], texts[0])]
                else:
                    headers = list(zip(names, texts, strict=True))
                while True:
                    try:  # By position: arguments by name take a third of the time of a call.
                        produce(topic, value, key, partition, None, None, timestamp, headers)
                        break
                    except BufferError:  # librdkafka's queue is full: let it drain.
                        producer.poll(_POLL_SECONDS)
            except KafkaException as error:
                if (refusal := _refused_at_once(error.args[0], topic)) is None:
                    self._topics.forget(topic)  # It may have been recreated, with fewer partitions.
                    raise
                self._refusals[id_] = refusal
            except Exception as error:  # The client cannot encode the row. Refuse this row alone.
                fault = fault_of(OutboxRow(*fields)) or f"no record can be made of it: {type(error).__name__}: {error}"
                self._refusals[id_] = Refusal(fault)
        self._has_met_bad_rows = self._has_met_bad_rows or bool(self._refusals)

    def _misplaced(self, producer: Producer, topic: str, partition: int) -> Refusal | None:
        """The refusal of a record whose topic does not have its partition.

        A topic that seems to have too few partitions is looked up again, once for these records: it may have got more.

        Raises:
            LogUnavailable: Kafka does not answer.
        """
        if partition < self._topics.partitions(topic):
            return None
        if topic not in self._counted:
            self._counted[topic] = self._topics.look_up_partitions(producer, topic)
        count = self._counted[topic]
        if count is None or partition < count:
            return None
        return Refusal(f"topic {topic}: it has {count} partition(s), and no partition {partition}")

    def _make_room(self, producer: Producer, row: OutboxRow) -> None:
        """Make room for a record of a limited topic: first send the group before it, if both together are too large."""
        size = 1 + length_of(row)
        if self._group and self._group_bytes + size > self._limits[row.topic]:
            self._are_groups_answered &= not producer.flush(REQUEST_TIMEOUT_SECONDS)
            self.interpret_failures()
            self._group, self._group_bytes = [], 0
        self._group.append(row)
        self._group_bytes += size

    def interpret_failures(self, *, blames_clock: bool = False) -> Deliveries:
        """Decide which rows are refused for the deliveries that have failed since the last call.

        Args:
            blames_clock: whether the transaction has failed for a timestamp. A record that has no timestamp of its own
                is not at fault then.

        Returns:
            What is known of all of the last records.
        """
        reports, self._failed_reports = self._failed_reports, []
        if reports:
            rows = self._rows_by_content()
            # Then a clock is wrong, and no row. librdkafka reports the records of a batch of several as invalid.
            is_untimely = any(error.code() == KafkaError.INVALID_TIMESTAMP for error, *_ in reports)
            blames_clock = blames_clock or is_untimely
            dated = {row.topic for row in self._rows if _timestamp_of(row) is not None} if is_untimely else set()
            alone, sent_together = self._alone(), set()
            for error, topic, key, value in reports:
                # A report has no headers to tell rows apart that are alike.
                alike = rows.get((topic, key or b"", value), [])
                concerned = [alone[topic]] if alone.get(topic) in alike else alike
                was_alone = concerned == [alone.get(topic)]
                if error.code() == KafkaError.INVALID_TIMESTAMP and topic in dated and not was_alone:
                    self._search(error, topic, concerned)
                else:
                    self._interpret(error, topic, concerned, was_alone=was_alone, blames_clock=blames_clock)
                if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                    self._too_large.add(topic)
                    sent_together |= set() if was_alone else {topic}
            self._narrow(sent_together)
            self._failed -= self._refusals.keys()
        return Deliveries(
            dict(self._refusals),
            tuple(self._failures),
            frozenset(self._failed),
            self._narrowed,
            frozenset(self._too_large),
            frozenset(self._invalid),
            dict(self._off_clock),
        )

    def _rows_by_content(self) -> dict[tuple[str, bytes, bytes | None], list[OutboxRow]]:
        """The rows that were handed to the producer, by topic, key and value, as a delivery report has them."""
        rows: dict[tuple[str, bytes, bytes | None], list[OutboxRow]] = {}
        for row in self._rows:
            if row.id in self._refusals or row.key is None or isinstance(row.value, TooLarge | Misfit):
                continue
            rows.setdefault((row.topic, *_key_and_value(row)), []).append(row)
        return rows

    def _search(self, error: KafkaError, topic: str, concerned: list[OutboxRow]) -> None:
        """Send the topic's records one by one next time, to find out whose timestamp a broker refuses.

        If it refuses that of a single record, librdkafka reports the error for all records of the batch.
        """
        self._topics.forget(topic)
        self._failures.append(error)
        self._failed.update(row.id for row in concerned)
        self._searched.add(topic)
        self._send_one_by_one(topic)

    def _interpret(
        self, error: KafkaError, topic: str, concerned: list[OutboxRow], *, was_alone: bool, blames_clock: bool
    ) -> None:
        """Take in one failed delivery.

        Args:
            error: why it failed.
            topic: of the record.
            concerned: the rows that it may have been of.
            was_alone: whether it is known that the row was the only one of its topic in its group.
            blames_clock: as for `interpret_failures`.
        """
        dated = [row for row in concerned if _timestamp_of(row) is not None] if error.code() in _UNTIMELY else []
        if error.code() == KafkaError.INVALID_TIMESTAMP and not dated:
            self._off_clock[topic] = error.str()
        self._topics.forget(topic)  # It may have lost a leader. It is looked up before the next record.
        if error.code() not in _PURGED:
            self._failures.append(error)
        if error.code() == KafkaError._MSG_TIMED_OUT:
            self._topics.silent([topic])
        self._failed.update(row.id for row in concerned)
        if dated:
            if len(dated) == len(concerned) and _are_alike(concerned):
                self._refusals |= {row.id: _untimely(row, error) for row in dated}
                self.end_search()
            else:
                self._send_one_by_one(topic)
            return
        is_clock = blames_clock and error.code() in _INVALID
        if is_clock or (refusal := self._refusal(error, topic, was_alone=was_alone)) is None:
            return
        if refusal.whole_topic or _are_alike(concerned):
            self._refusals |= {row.id: refusal for row in concerned}
            if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                self._too_large_alone.update(row.id for row in concerned)
            self._invalid.update(row.id for row in concerned if error.code() in _INVALID)
        else:
            self._send_one_by_one(topic)

    def _send_one_by_one(self, topic: str) -> None:
        """Send the topic's records one by one next time, to find out which of them it was."""
        self._limits[topic], self._narrowed = 0, True

    def _narrow(self, topics: set[str]) -> None:
        """Send the records of `topics` in smaller groups next time, as a batch of several was too large."""
        for topic in topics.intersection(row.topic for row in self._rows):  # A progress record has no smaller group.
            self._limits[topic] = _SMALLER[self._limits.get(topic)]
            self._narrowed = True

    def _alone(self) -> dict[str, OutboxRow]:
        """The rows that are the only ones of their topic in the last group, by topic.

        There are none once a flush has timed out: a report may be one of an earlier group then.
        """
        if not self._are_groups_answered:
            return {}
        rows_of = Counter(row.topic for row in self._group)
        return {row.topic: row for row in self._group if rows_of[row.topic] == 1}

    def refusals_by_size(self) -> dict[int, Refusal]:
        """Refusals of rows that follow a row of their topic that was too large, and have at least its size.

        They hold only where records are not compressed. Rows before the refused one have been sent: their own reports
        decide.
        """
        smallest: dict[str, int] = {}
        found: dict[int, Refusal] = {}
        for row in self._rows if self._too_large_alone else ():
            if row.id in self._too_large_alone:
                smallest[row.topic] = min(record_body_bytes(row), smallest.get(row.topic, sys.maxsize))
            elif row.topic not in smallest or row.id in self._refusals or fault_of(row) is not None:
                continue
            elif record_body_bytes(row) >= smallest[row.topic]:
                found[row.id] = Refusal(f"larger than the topic {row.topic} takes")
        return found

    def refused_topics(self) -> set[str]:
        """The topics of which a broker has refused records for what they are, since the last `interpret_failures`."""
        return {
            topic
            for error, topic, *_ in self._failed_reports
            if error.code() in {*_INVALID, KafkaError.INVALID_TIMESTAMP}
        }

    def forbidden_rows(self, settings: Settings) -> dict[int, Refusal]:
        """The refusals of the last rows whose topics we may not write to.

        We may describe a topic that we may not write to, so the check before found nothing. The first transaction that
        writes to it fails as a whole.
        """
        topics = set(column(self._rows, "topic"))
        with closing(KafkaAdmin(settings)) as admin:
            writable = admin.writable(topics)
        forbidden = {
            topic: Refusal(f"topic {topic}: we may describe it, but not write to it", whole_topic=True)
            for topic in topics - writable
        }
        return refused_by_topic(self._rows, UnwritableTopics(forbidden))

    def _refusal(self, error: KafkaError, topic: str, *, was_alone: bool) -> Refusal | None:
        if error.code() in FORBIDDEN_TOPIC:
            return Refusal(f"topic {topic}: {error.str()}", whole_topic=True)
        if error.code() in _INVALID:
            return Refusal(error.str())
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE and was_alone:
            return Refusal(f"larger than the topic {topic} takes: {error.str()}")
        return None


def refused_by_topic(rows: Sequence[OutboxRow], verdict: UnwritableTopics) -> dict[int, Refusal]:
    """The refusals of those `rows` whose topics are refused, by their ids."""
    return (
        {row.id: verdict.refused[row.topic] for row in rows if row.topic in verdict.refused} if verdict.refused else {}
    )


def away_by_clock(error: str) -> Away:
    """How long a topic is away whose broker refuses the time of our clock. The rows have no timestamps of their own."""
    return Away(f"the clock of this machine and that of a broker differ: {error}", CLOCK_SECONDS)


def _are_alike(rows: Sequence[OutboxRow]) -> bool:
    """Whether rows with the same key and value have the same headers, too, and the same partition and timestamp."""
    return all(_beside(row) == _beside(rows[0]) for row in rows)


def _beside(row: OutboxRow) -> tuple[Any, ...]:
    own = row.value[2:] if isinstance(row.value, WholeRecord) else (None, None)
    return row.header_keys, row.header_values, *own


def _timestamp_of(row: OutboxRow) -> int | None:
    return row.value.timestamp if isinstance(row.value, WholeRecord) else None


def _untimely(row: OutboxRow, error: KafkaError) -> Refusal:
    return Refusal(f"its timestamp, {as_time(_timestamp_of(row) or 0)}: {error.str()}")


def _key_and_value(row: OutboxRow) -> tuple[bytes, bytes | None]:
    """The key and the value of a row as bytes, as a delivery report has them."""
    value: Any = row.value
    key, value = (value.key, value.value) if isinstance(value, WholeRecord) else (row.key, value)
    return (key.encode() if isinstance(key, str) else key), (value.encode() if isinstance(value, str) else value)


def _as_produced(record: WholeRecord) -> tuple[str | bytes, str | bytes | None, int, int]:
    """A whole record's key, value, partition and timestamp, as arguments of `produce`."""
    partition = _ANY_PARTITION if record.partition is None else record.partition
    return record.key, record.value, partition, record.timestamp or _NOW


def _refused_at_once(error: KafkaError, topic: str) -> Refusal | None:
    if error.code() in FORBIDDEN_TOPIC:
        return Refusal(f"topic {topic}: {error.str()}", whole_topic=True)
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return Refusal(f"larger than the client's message.max.bytes: {error.str()}")
    return None
