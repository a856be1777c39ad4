"""`Inbox`: polls Kafka, dispatches to handlers, commits offsets, and takes part in rebalances."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_clients import client_config, readable_headers, refusal, refused_property
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.event_identity import event_identity
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import InvalidSetting, OutboxError, ServerRefused
from outbox_plugin.inbox.cleaning import Keep
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.handling import Handling
from outbox_plugin.inbox.housekeeping import Housekeeping
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.positions import Positions, start_offsets
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Retry
from outbox_plugin.inbox.session import (
    AsyncBatchHandler,
    AsyncHandler,
    BatchHandler,
    Handler,
    TaskSession,
    ThreadSession,
)
from outbox_plugin.inbox.workers import TaskWorkers, ThreadWorkers
from outbox_plugin.insecure_settings import warn_about_insecure_settings
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import connect, one_line, reported_as_refusal
from outbox_plugin.schema.place import in_full
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings
from outbox_plugin.threads.background import Background

logger = logger_of("outbox_plugin.inbox")

SESSION_TIMEOUT_MS = 6_000  # Kafka gives a killed process's partitions to others after this time.
POLL_SECONDS = 0.1
POLL_RECORDS = 1_000
# Records in memory. At this bound it waits for room, then pauses until half of them are done.
MAX_HELD_RECORDS = 10_000
MAX_HELD_BYTES = 64_000_000  # The same bound for the bytes of their keys, values and headers.
QUEUED_KILOBYTES = 16_384  # What librdkafka may fetch ahead. Its own default is 64 MB.
ROOM_SECONDS = 0.5  # How long it waits for room before it pauses: a pause drops what librdkafka has fetched ahead.
COMMIT_SECONDS = 0.5
RELEASE_SECONDS = 20.0
UNKNOWN_ID_SECONDS = 0.2  # The wait before records are fetched again whose topic's id Kafka did not return.
_RESET, _FROM_THE_BEGINNING = "auto.offset.reset", {"earliest", "smallest", "beginning"}
_WAITED_FOR = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._ALL_BROKERS_DOWN}
_REFUSED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
}


class Inbox(Background):
    """Consumes topics and runs a handler for each event. The handler's database effects happen once.

    The handler gets a psycopg connection, with a transaction open, and the event. What it writes, emits included, is
    committed together with the event's idempotency key. It may run more than once, but only one run is committed. An
    `async def` handler gets an `AsyncConnection`, and runs in the event loop of `async with`.

    Any number of processes may run with one `group`; they share the partitions.

    Example:
        def handle(connection: psycopg.Connection, event: Received) -> None:
            connection.execute("UPDATE account SET …", event.json())

        with Inbox(Settings(), group="billing", topics=["orders"], handler=handle):
            ...  # It consumes in the background; records that are being handled are finished at the end.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        group: str,
        topics: Sequence[str],
        handler: Handler | AsyncHandler | BatchHandler | AsyncBatchHandler,
        batch_size: int | None = None,
        concurrency: int = 4,
        retry: Retry = Retry(),  # noqa: B008 - frozen.
        keep: timedelta = timedelta(days=7),
        keep_dead_letters: timedelta = timedelta(days=30),
    ) -> None:
        """Check the arguments. The connections are made when the inbox starts.

        Args:
            settings: Kafka, and the database of the effects, in which `outbox migrate` has made the inbox's tables.
            group: the consumer group; an event has its effect once for each group.
            topics: the topics to consume; the group reads a partition from its beginning if it has not been there.
            handler: is called with an event, or, with a `batch_size`, with a list of events.
            batch_size: the highest number of events in a list, each key's in order; None to pass single events.
            concurrency: how many handlers run at the same time, each on a connection of its own.
            retry: how often a failing record is tried, and how long it waits between.
            keep: how long a handled event is remembered. If Kafka delivers it again later, it has its effect again.
            keep_dead_letters: how long dead letters are kept.

        Raises:
            InvalidSetting: no group, no topic, or a concurrency or batch size below 1.
        """
        if not group or isinstance(topics, str) or not topics or concurrency < 1:
            raise InvalidSetting(
                f"Inbox: expected a group, a list of topics, and a concurrency of at least 1 "
                f"(given: group={group!r}, topics={topics!r}, concurrency={concurrency})"
            )
        if batch_size is not None and batch_size < 1:
            raise InvalidSetting(f"Inbox: expected a batch_size of at least 1 (given: {batch_size})")
        super().__init__(f"inbox {group}")
        self._settings = settings
        self._group = group
        self._topics = list(topics)
        self._handler = handler
        self._concurrency = concurrency
        self._retry = retry
        self._keep = Keep(keep, keep_dead_letters)
        self._in_batches = batch_size is not None
        self._dispatcher = Dispatcher(concurrency, batch_size)
        self._paused = False
        self._next: dict[TopicPartition, int] = {}
        self._positions: Positions

    @property
    def partitions(self) -> list[TopicPartition]:
        """The partitions that this process handles now, as named tuples of topic and partition."""
        return self._dispatcher.locked(KeyQueues.partitions)

    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:
        self._check()
        self._topic_ids = TopicIds(self._settings)
        workers = self._workers(loop)
        return partial(self._consume, self._consumer(), workers)

    def _check(self) -> None:
        start = self._settings.kafka.get(_RESET, "earliest")
        if start not in _FROM_THE_BEGINNING:
            raise InvalidSetting(
                f"OUTBOX_KAFKA: {_RESET}={start} would let an inbox pass over events; "
                "to start at the end, set the group's offsets there before it starts"
            )
        warn_about_insecure_settings(self._settings)
        KafkaAdmin(self._settings).check_reachable()
        with reported_as_refusal(self._settings), connect(self._settings, purpose="outbox inbox (start)") as connection:
            table = in_full(connection, self._settings.table)
            self._settings = self._settings.model_copy(update={"table": table})
            connection.execute(statement("inbox", "letters", table), {"group": self._group, "limit": 0})
            connection.execute(statement("inbox", "is_migrated", table))
            self._positions = Positions(self._settings, self._group)
            self._positions.read(connection, {})

    def _workers(self, loop: asyncio.AbstractEventLoop | None) -> ThreadWorkers | TaskWorkers:
        handling = Handling(self._settings.table, self._group, self._retry, random.random, in_batches=self._in_batches)
        handler = self._handler
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None)):  # noqa: B004
            awaited = cast(Callable[[Any, Any], Awaitable[None]], handler)
            return TaskWorkers(
                self._dispatcher, handling, lambda: TaskSession(self._settings, awaited), self._concurrency, loop
            )
        called = cast(Callable[[Any, Any], None], handler)
        return ThreadWorkers(
            self._dispatcher, handling, lambda: ThreadSession(self._settings, called), self._concurrency
        )

    def _consumer(self) -> Consumer:
        config = client_config(
            self._settings,
            group_id=self._group,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=1_000,
            topic_metadata_refresh_interval_ms=5_000,
            fetch_wait_max_ms=100,
            queued_max_messages_kbytes=QUEUED_KILOBYTES,
        )
        # Our callbacks need these two, so OUTBOX_KAFKA cannot change them.
        config |= {"partition.assignment.strategy": "cooperative-sticky", "enable.auto.offset.store": False}
        try:
            consumer = Consumer(config)
        except KafkaException as error:
            raise refused_property(error) from None
        consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        return consumer

    def _consume(self, consumer: Consumer, workers: ThreadWorkers | TaskWorkers) -> None:
        housekeeping = Housekeeping(self._settings, self._group, self._dispatcher, self._positions, self._keep)
        workers.start()
        housekeeping.start()
        try:
            committed_at = time.monotonic()
            while not self._stop.is_set():
                if workers.error is not None:
                    raise OutboxError(f"a handler's worker has ended: {one_line(workers.error)}") from workers.error
                self._take_in(consumer)
                self._hold_back(consumer)
                self._begin_anew(
                    consumer,
                    self._topic_ids.recreated({topic for topic, _ in self._dispatcher.locked(KeyQueues.partitions)}),
                )
                if time.monotonic() - committed_at > COMMIT_SECONDS:
                    self._commit(consumer, self._dispatcher.locked(KeyQueues.committable), wait=False)
                    committed_at = time.monotonic()
        finally:
            housekeeping.stop()
            self._dispatcher.stop()
            # Other members wait for our partitions, so wait no longer than at a rebalance. A handler that still runs
            # keeps its transaction: a member that gets its event waits for that, and then leaves the event out.
            positions = self._dispatcher.locked(KeyQueues.positions)
            reached = self._dispatcher.release(self._dispatcher.locked(KeyQueues.partitions), RELEASE_SECONDS)
            self._commit(consumer, reached, wait=True)
            try:
                # Before the partitions go to their next owner, who may write greater positions.
                if housekeeping.join():
                    self._positions.write_last(
                        {tp: at._replace(next_offset=reached.get(tp, at.next_offset)) for tp, at in positions.items()}
                    )
            finally:
                consumer.close()
                workers.join()

    def _take_in(self, consumer: Consumer) -> None:
        """Poll, and add the records. The first is added before the second call, which may run a rebalance."""
        if (first := consumer.poll(POLL_SECONDS)) is None:
            return
        self._add(consumer, [first])
        # The size of the next records is unknown until they are here. Assume that of those that are held.
        held, held_bytes = self._dispatcher.locked(KeyQueues.load)
        room = max(0, MAX_HELD_BYTES - held_bytes) * held // max(1, held_bytes)
        if records := min(POLL_RECORDS, room):
            self._add(consumer, consumer.consume(records, 0))

    def _add(self, consumer: Consumer, messages: Sequence[Message]) -> None:
        good = [message for message in messages if (error := message.error()) is None or self._noted(error)]
        polled = cast(list[Any], good)  # Whose stubs say that each of these may be missing; of a record none is.
        at = [(each.topic(), each.partition(), each.offset()) for each in polled]
        doubtful = {tp[0] for tp in at if self._goes_back(*tp) or not self._topic_ids.of(tp[0])}
        left_out = self._unconfirmed(consumer, doubtful, at)
        received = [self._received(message) for message in good if message.topic() not in left_out]
        # A name by the topic's id is right only if Kafka returns that id after the record came.
        if unnamed := {record.topic for record in received if record.named_by_place} - doubtful:
            at = [(record.topic, record.partition, record.offset) for record in received]
            left_out = self._unconfirmed(consumer, unnamed, at)
            received = [record for record in received if record.topic not in left_out]
        self._dispatcher.add(received)

    def _unconfirmed(self, consumer: Consumer, topics: Collection[str], at: Sequence[tuple[str, int, int]]) -> set[str]:
        """Ask Kafka for the ids of topics, and seek back where it does not answer, to the first offset in `at`.

        Returns the topics whose records must be left out, because they come again.
        """
        if not topics:
            return set()
        answer = self._topic_ids.look_up(topics)
        self._begin_anew(consumer, answer.recreated)
        silent = {*topics} - answer.known
        if silent:
            logger.warning("records of %s wait until Kafka returns the id of the topic", ", ".join(sorted(silent)))
            first: dict[TopicPartition, int] = {}
            for topic, partition, offset in at:
                if topic in silent:
                    first.setdefault(TopicPartition(topic, partition), offset)
            for tp, offset in first.items():
                self._next.pop(tp, None)
                with suppress(KafkaException):  # The partition is not ours any more.
                    consumer.seek(KafkaTopicPartition(*tp, offset))
            self._stop.wait(UNKNOWN_ID_SECONDS)
        return answer.recreated | silent

    def _goes_back(self, topic: str, partition: int, offset: int) -> bool:
        """Whether a record's offset is below the next one of its partition, so that the topic may be another one."""
        tp = TopicPartition(topic, partition)
        expected, self._next[tp] = self._next.get(tp, 0), offset + 1
        return offset < expected

    def _begin_anew(self, consumer: Consumer, topics: Collection[str]) -> None:
        """Read topics from their beginning that were deleted and made anew."""
        partitions = [tp for tp in self._dispatcher.locked(KeyQueues.partitions) if tp.topic in topics]
        if not partitions:
            return
        logger.warning("the topic %s was made anew, and is read from its beginning", ", ".join(sorted(topics)))
        self._dispatcher.release(partitions, RELEASE_SECONDS)
        topic_ids = self._topic_ids.known()
        self._dispatcher.locked(lambda queues: queues.assign(partitions, topic_ids))
        for tp in partitions:
            self._next.pop(tp, None)
            consumer.seek(KafkaTopicPartition(*tp, OFFSET_BEGINNING))

    def _received(self, message: Message) -> Received:
        polled: Any = message  # Whose stubs say that each of these may be missing; of a record none is.
        topic, partition, offset = polled.topic(), polled.partition(), polled.offset()
        found = readable_headers(message)
        headers = tuple(cast(Any, found) or ())
        known = event_identity(headers, f"{self._topic_ids.of(topic)}/{partition}/{offset}")
        return Received(
            topic,
            partition,
            offset,
            polled.timestamp()[1],
            polled.key(),
            polled.value(),
            headers,
            known.key,
            formerly=None if known.named else f"{topic}/{partition}/{offset}",
            unreadable_headers=found is None,
            named_by_place=not (known.named or known.placed),
        )

    def _noted(self, error: KafkaError) -> bool:
        """Log an error that a poll returned. Raises ServerRefused if waiting cannot mend it. Returns False always."""
        if error.fatal() or error.code() in _REFUSED:
            raise ServerRefused(str(refusal(error, self._settings)))
        (logger.warning if error.code() in _WAITED_FOR else logger.info)("Kafka, while consuming: %s", error.str())
        return False

    def _hold_back(self, consumer: Consumer) -> None:
        """Bound the records in memory by a pause. Polling goes on, because it keeps us in the group."""
        held, held_bytes = self._dispatcher.locked(KeyQueues.load)
        full = max(held / MAX_HELD_RECORDS, held_bytes / MAX_HELD_BYTES)
        if not self._paused and full >= 1:
            if not self._dispatcher.wait_for_room(MAX_HELD_RECORDS, MAX_HELD_BYTES, ROOM_SECONDS):
                consumer.pause(consumer.assignment())
                self._paused = True
        elif self._paused and full < 0.5:
            consumer.resume(consumer.assignment())
            self._paused = False

    def _commit(self, consumer: Consumer, reached: dict[TopicPartition, int], *, wait: bool) -> None:
        """Commit offsets. A failure costs work only: events that are delivered again are left out."""
        if not reached:
            return
        # With the topic's id as metadata, because the offset means nothing in a topic that is made anew meanwhile.
        offsets = [
            KafkaTopicPartition(topic, partition, offset, self._topic_ids.of(topic))
            for (topic, partition), offset in reached.items()
        ]
        try:
            if wait:
                consumer.commit(offsets=offsets, asynchronous=False)
            else:
                consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            logger.info("offsets were not committed: %s", error.args[0].str())

    def _assigned(self, consumer: Consumer, partitions: list[KafkaTopicPartition]) -> None:
        def look_up() -> dict[str, str]:
            answer = self._topic_ids.look_up(each.topic for each in partitions)
            self._begin_anew(consumer, answer.recreated)  # Only partitions that are ours already.
            return {topic: self._topic_ids.of(topic) for topic in answer.known}

        found = start_offsets(self._positions, consumer, partitions, look_up, self._stop)
        if found is None:  # The inbox stops, and must handle none of their records.
            for each in partitions:
                each.offset = OFFSET_END
            consumer.incremental_assign(partitions)
            return
        for each in partitions:
            tp = TopicPartition(each.topic, each.partition)
            self._next.pop(tp, None)
            each.offset = found.get(tp, OFFSET_BEGINNING)  # Not Kafka's own, which may be of an older topic.
        assigned, topic_ids = (
            [TopicPartition(each.topic, each.partition) for each in partitions],
            self._topic_ids.known(),
        )
        self._dispatcher.locked(lambda queues: queues.assign(assigned, topic_ids, found))
        consumer.incremental_assign(partitions)
        if self._paused:
            consumer.pause(partitions)

    def _revoked(self, consumer: Consumer, partitions: list[KafkaTopicPartition]) -> None:
        reached = self._dispatcher.release(
            [TopicPartition(each.topic, each.partition) for each in partitions], RELEASE_SECONDS
        )
        self._commit(consumer, reached, wait=True)
        consumer.incremental_unassign(partitions)

    def _lost(self, consumer: Consumer, partitions: list[KafkaTopicPartition]) -> None:
        self._dispatcher.release([TopicPartition(each.topic, each.partition) for each in partitions], 0)
        consumer.incremental_unassign(partitions)
