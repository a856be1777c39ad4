"""Reads and writes the coordination topic and its state topic."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from threading import Lock
from typing import Any

from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
)
from confluent_kafka import Message as Record
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import ListOffsetsResultInfo, OffsetSpec

from outbox_plugin.adapters.kafka_admin import END_OFFSET, KafkaAdmin
from outbox_plugin.adapters.kafka_clients import (
    REACH_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    UNKNOWN_TOPIC,
    close_consumer,
    connection_error,
    internal_client_config,
    is_group_name,
    refused_property,
)
from outbox_plugin.adapters.kafka_reader import bounds, find_leaders
from outbox_plugin.adapters.offset_commits import in_commits
from outbox_plugin.coordination.actions import KeepPosition
from outbox_plugin.coordination.coordination_topics import (
    APPEAR_SECONDS,
    STATE_SUFFIX,
    check_name,
    describe,
    ensure_topics,
    found_of,
)
from outbox_plugin.coordination.group_view import TopicForm
from outbox_plugin.coordination.messages import (
    Entry,
    MalformedMessage,
    Message,
    ReleaseGroup,
    decode,
    encode,
)
from outbox_plugin.coordination.partition_owners import Key
from outbox_plugin.coordination.state_topic import (
    CLOCK_KEY,
    CoordinationForm,
    KeptPosition,
    KeptState,
    form_record,
    pause_record,
    position_record,
)
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import LogUnavailable, OutboxError, ServerRefused, UserError
from outbox_plugin.kafka_settings import KafkaSettings
from outbox_plugin.printable import logger_of

LOGGER = logger_of(__name__)

TOPIC = "__marshal"
CATCH_UP_SECONDS = 60.0
CLOSE_SECONDS = 5.0
MAX_READ = 50_000  # Messages in one read. An instance that holds 10,000 partitions sends fewer between two reads.
_LATE = {KafkaError._MSG_TIMED_OUT, KafkaError.REQUEST_TIMED_OUT, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}


class CoordinationLog:
    """One group's reader and writer of the coordination topic and its state topic. `send` is for any thread."""

    def __init__(self, settings: KafkaSettings, topic: str, group_id: str) -> None:
        """Connect, make the topics if they are missing, check their form, and read what is kept.

        Args:
            settings: which Kafka.
            topic: the coordination topic.
            group_id: the group.

        Raises:
            UserError: the name of the topic or of the group is not allowed, or a topic has a form that would break what
                is promised.
            ServerRefused: no broker answers, or it does not let us in.
            LogUnavailable: Kafka is away.
        """
        check_name(topic)
        if not is_group_name(group_id):
            raise UserError(f"group_id: expected a name that begins with no white space (given: {group_id!r})")
        self._settings = settings
        self._group_id = group_id
        self.topic = topic
        self.malformed = 0
        self.kept = KeptState()
        self._trouble: OutboxError | None = None
        self._guard = Lock()
        self._to_commit: dict[TopicPartition, int] = {}  # Kept, and not yet committed in Kafka; `_guard` guards it.
        self._closed = False
        with ExitStack() as opened:  # What is opened is closed, whatever a later step raises.
            try:
                # First, so that it connects while we do the rest.
                self._writer = Producer(
                    internal_client_config(settings, enable_idempotence=True, linger_ms=0, message_timeout_ms=5_000)
                )
                opened.callback(self._writer.close)
                self._reader = Consumer(
                    internal_client_config(
                        settings,
                        group_id=group_id,  # To read and commit its offsets; this client joins no group.
                        enable_auto_commit=False,
                        auto_offset_reset="earliest",
                        fetch_wait_max_ms=50,
                        fetch_min_bytes=1,
                    )
                    | {"on_commit": lambda _error, _offsets: None}  # Without it, librdkafka logs each refusal.
                )
                opened.callback(self._reader.close)
            except KafkaException as error:
                raise refused_property(error) from None
            except LogUnavailable as error:  # There is no token for Kafka.
                raise ServerRefused(str(error)) from None
            self._admin = opened.enter_context(closing(KafkaAdmin.at_start(settings)))
            self._forms = ensure_topics(self._admin.client, topic, settings)
            self._ahead = self._ask_for_time()
            self._read_state()
            self.form = self._agree_on_form(self._forms[topic])
            self.width = self.form.width
            opened.pop_all()

    def log_time(self) -> float:
        """The brokers' time, in seconds since the epoch."""
        return time.monotonic() + self._ahead

    def since(self, lookback_seconds: float) -> float:
        """The time from which the log shows who holds what, in seconds since the epoch."""
        return max(self.log_time() - lookback_seconds, self.form.since)

    def _ask_for_time(self) -> float:
        """The log's time minus our monotonic time, from the broker's timestamp of a record that we write."""
        stamps: list[float] = []

        def delivered(error: KafkaError | None, record: Record) -> None:
            if error is None:
                kind, milliseconds = record.timestamp()
                stamps.append((milliseconds if kind == TIMESTAMP_LOG_APPEND_TIME else 0) / 1000 - time.monotonic())
            else:
                self._delivered(error, record)

        deadline, has_warned = time.monotonic() + APPEAR_SECONDS, False
        while not stamps and time.monotonic() < deadline:  # A new topic may have no leader yet.
            self._writer.produce(self.topic + STATE_SUFFIX, b"", key=CLOCK_KEY, partition=0, on_delivery=delivered)
            self._writer.flush(REQUEST_TIMEOUT_SECONDS)
            self._raise_trouble()
            if not (stamps or has_warned):
                has_warned, state = True, self.topic + STATE_SUFFIX
                LOGGER.warning("Kafka: %s takes no record yet; this is tried for up to %.0f s", state, APPEAR_SECONDS)
        if not stamps:
            raise LogUnavailable(f"Kafka: {self.topic}{STATE_SUFFIX} does not take a record")
        return stamps[0]

    def _read_state(self) -> None:
        state = self.topic + STATE_SUFFIX
        find_leaders(self._reader, state)
        first, end = self.bounds(state, 0)
        self._reader.assign([KafkaTopicPartition(state, 0, first)])
        for record in self._up_to({KafkaTopicPartition(state, 0): end} if end > first else {}):
            self.kept.take_in(record.key(), record.value())

    def _agree_on_form(self, found: TopicForm) -> CoordinationForm:
        """The form of the coordination topic. The first instance that sees the topic decides it for good."""
        known = self.kept.form
        if known is not None and known.topic_id == found.topic_id:
            return known
        form = CoordinationForm(found.partitions, found.topic_id, 0.0 if known is None else self.log_time())
        if not self._keep([form_record(form)], wait=True):
            raise LogUnavailable(f"Kafka: {self.topic}{STATE_SUFFIX} does not take a record")
        return form

    def follow(self, partitions: Collection[int], since: float) -> Iterator[Entry]:
        """Read `partitions` from the time `since` up to their present end; `read` continues from there.

        Raises:
            LogUnavailable: Kafka is away.
        """
        ends = {KafkaTopicPartition(self.topic, each): self.bounds(self.topic, each)[1] for each in partitions}
        try:
            found = self._reader.offsets_for_times(
                [KafkaTopicPartition(self.topic, each, max(0, int(since * 1000))) for each in partitions], REACH_SECONDS
            )
        except KafkaException as error:
            raise connection_error(error.args[0], self._settings) from None
        if errors := [each.error for each in found if each.error is not None]:  # Of brokers that do not answer.
            raise connection_error(errors[0], self._settings)
        starts = {KafkaTopicPartition(self.topic, each.partition): each.offset for each in found}
        starts = {at: offset if offset >= 0 else ends[at] for at, offset in starts.items()}
        self._reader.assign([KafkaTopicPartition(at.topic, at.partition, offset) for at, offset in starts.items()])
        for record in self._up_to({at: end for at, end in ends.items() if starts[at] < end}):
            if (entry := self._entry(record)) is not None:
                yield entry

    def read_on(self, partition: int) -> Iterator[Entry]:
        """Read on until a partition of which we have read an entry has been read up to its present end.

        Raises:
            LogUnavailable: Kafka is away.
        """
        end = self.bounds(self.topic, partition)[1]
        for record in self._up_to({KafkaTopicPartition(self.topic, partition): end}):
            if (entry := self._entry(record)) is not None:
                yield entry

    def _up_to(self, ends: dict[KafkaTopicPartition, int]) -> Iterator[Record]:
        """Read the assigned partitions until each position is at its end."""
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while ends:
            positions = {(at.topic, at.partition): at.offset for at in self._reader.position(list(ends))}
            ends = {at: end for at, end in ends.items() if positions[at.topic, at.partition] < end}
            if ends:
                yield from self._consume(1.0)
            if time.monotonic() > deadline:
                raise LogUnavailable(f"Kafka: {self.topic} could not be read up to its end in {CATCH_UP_SECONDS:.0f} s")

    def read(self, wait_seconds: float) -> list[Entry]:
        """The next entries, waiting up to `wait_seconds` for the first. Malformed records are counted and skipped.

        Raises:
            UserError: the topic has lost a property that promises rest on.
            ServerRefused: we are not let in.
        """
        self._commit()
        self._raise_trouble()
        found = []
        for record in self._consume(wait_seconds):
            if (entry := self._entry(record)) is None:
                continue
            if record.timestamp()[0] != TIMESTAMP_LOG_APPEND_TIME:
                raise UserError(f"the topic {self.topic} has message.timestamp.type=CreateTime; expected LogAppendTime")
            found.append(entry)
        if found:
            self._ahead = found[-1].at - time.monotonic()
        return found

    def _consume(self, wait_seconds: float) -> Iterator[Record]:
        found = self._reader.consume(1, wait_seconds) or []
        found += self._reader.consume(MAX_READ, 0) if found else []
        for record in found:
            if (error := record.error()) is None:
                yield record
            elif error.code() in UNKNOWN_TOPIC:
                raise self._gone()
            elif not isinstance(problem := connection_error(error, self._settings), LogUnavailable):
                raise problem

    def _entry(self, record: Record) -> Entry | None:
        partition, offset = record.partition() or 0, record.offset() or 0
        try:
            message = decode(record.value())
        except MalformedMessage as malformed:
            self.malformed += 1
            LOGGER.warning("%s, partition %s, offset %s: skipped: %s", self.topic, partition, offset, malformed)
            return None
        return Entry(partition, offset, record.timestamp()[1] / 1000, message)

    def send(self, message: Message, partition: int) -> None:
        """Write `message` without waiting. If it cannot be sent in time, it is lost."""
        with suppress(BufferError, KafkaException):
            self._writer.produce(self.topic, encode(message), partition=partition, on_delivery=self._delivered)

    def _delivered(self, error: KafkaError | None, record: Record) -> None:
        if error is None or error.code() in _LATE or error.retriable():
            return
        if error.code() in UNKNOWN_TOPIC:
            self._trouble = self._gone()
        elif error.code() == KafkaError.INVALID_RECORD:
            self._trouble = UserError(
                f"the topic {record.topic()} refuses what we write: expected cleanup.policy=delete, and "
                f"compact for {self.topic}{STATE_SUFFIX}"
            )
        elif not isinstance(problem := connection_error(error, self._settings), LogUnavailable):
            self._trouble = problem

    def _gone(self) -> UserError:
        return UserError(
            f"the topic {self.topic} or {self.topic}{STATE_SUFFIX} was deleted or recreated while it was followed: "
            "start the group's consumers again"
        )

    def _raise_trouble(self) -> None:
        self._writer.poll(0)
        if self._trouble is not None:
            raise self._trouble

    def ask_for_forms(self, topics: Collection[str]) -> dict[str, Future[Any]]:
        """Request the forms of `topics` and of our own topics, without waiting."""
        return describe(self._admin.client, {*topics, *self._forms})

    def check_forms(self, asked: Mapping[str, Future[Any]]) -> dict[str, TopicForm]:
        """The forms of the consumed topics that exist, from answers that have arrived; empty while Kafka is away.

        Raises:
            UserError: one of our own topics was deleted or recreated.
        """
        with suppress(KafkaException, TimeoutError):
            found = found_of(asked)
            if any(topic not in found or found[topic].topic_id != form.topic_id for topic, form in self._forms.items()):
                raise self._gone()
            return {topic: form for topic, form in found.items() if topic not in self._forms}
        return {}

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The group's committed offsets in Kafka; partitions without one are left out.

        Raises:
            LogUnavailable: Kafka is away.
        """
        if not partitions:
            return {}
        try:
            stored = self._reader.committed([KafkaTopicPartition(*tp) for tp in partitions], REQUEST_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise connection_error(error.args[0], self._settings) from None
        return {tp: each.offset for tp, each in zip(partitions, stored, strict=True) if each.offset >= 0}

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The offsets of a partition's first record and of its next one.

        Raises:
            LogUnavailable: Kafka is away, or there is no such partition.
        """
        try:
            return bounds(self._reader, KafkaTopicPartition(topic, partition))
        except KafkaException as error:
            raise LogUnavailable(f"Kafka, {topic}, partition {partition}: {error.args[0].str()}") from None

    def ask_for_offsets(
        self, partitions: Collection[TopicPartition], spec: OffsetSpec = END_OFFSET
    ) -> dict[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Request an offset of each partition, without waiting: one request to each broker.

        Without a `spec`, it is the end that readers of committed records see.
        """
        with suppress(KafkaException):
            places = (KafkaTopicPartition(*tp) for tp in partitions)
            asked = self._admin.ask_for_offsets(places, spec, REQUEST_TIMEOUT_SECONDS)
            return {TopicPartition(at.topic, at.partition): answer for at, answer in asked.items()}
        return {}

    def keep(self, positions: Collection[KeepPosition], *, wait: bool = False) -> bool:
        """Write positions to the state topic; the next `read`, `flush` or `close` commits them in Kafka.

        Returns False if we `wait` and a record was not written.
        """
        records = [
            position_record(
                Key(self._group_id, *each.topic_partition), KeptPosition(each.offset, each.at, each.topic_ids)
            )
            for each in positions
        ]
        if not records:
            return True
        with self._guard:
            self._to_commit.update((each.topic_partition, each.offset) for each in positions)
        return self._keep(records, wait=wait)

    def keep_pause(self, message: ReleaseGroup) -> None:
        """Write the group's pause, or its end, to the state topic, for instances that read only the log's last part.

        Raises:
            LogUnavailable: Kafka did not take it.
        """
        if not self._keep([pause_record(message)], wait=True):
            raise LogUnavailable(f"Kafka did not take what the group {self._group_id} is to do")

    def _commit(self) -> None:
        """Commit the kept positions as the group's offsets, for other tools. We never depend on it.

        Only the thread that reads may do it, or any thread once nobody reads: while one thread consumes in a loop, a
        commit by another one can wait for minutes. An admin client's request to the group's coordinator would need no
        reader, but librdkafka aborts the process if the connection is lost meanwhile (its issue 4605).
        """
        with self._guard:
            offsets, self._to_commit = self._to_commit, {}
        for commit in in_commits((KafkaTopicPartition(*tp, offset) for tp, offset in offsets.items()), self._group_id):
            with suppress(KafkaException):
                self._reader.commit(offsets=commit, asynchronous=True)

    def _keep(self, records: Collection[tuple[bytes, bytes]], *, wait: bool) -> bool:
        open_ = len(records)
        failed = False

        def delivered(error: KafkaError | None, record: Record) -> None:
            nonlocal open_, failed
            open_ -= 1
            failed |= error is not None
            self._delivered(error, record)

        for key, value in records:
            with suppress(BufferError, KafkaException):
                self._writer.produce(self.topic + STATE_SUFFIX, value, key=key, partition=0, on_delivery=delivered)
        deadline = time.monotonic() + REACH_SECONDS + 1
        while wait and open_ and time.monotonic() < deadline:
            self._writer.poll(0.05)
        return not wait or not (open_ or failed)

    def flush(self) -> None:
        """Commit what was kept, and wait until all messages are sent, or a few seconds have passed.

        The reading thread calls it at its end: a commit that came later could put the group back behind another
        instance's.
        """
        self._commit()
        self._writer.flush(CLOSE_SECONDS)

    def close(self) -> None:
        """Send all messages, and close. Safe to call twice."""
        if not self._closed:
            self._closed = True
            with ExitStack() as opened:  # Whatever one of them raises, the others are closed.
                opened.callback(self._admin.close)
                opened.callback(close_consumer, self._reader)
                opened.callback(self._writer.close)
                self._writer.flush(CLOSE_SECONDS)
                self._commit()
