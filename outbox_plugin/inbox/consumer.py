"""`Inbox`: polls Kafka, dispatches to handlers, commits offsets, and takes part in rebalances."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.kafka_clients import connection_error, refused_property
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.room import Room
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import InvalidSetting, OutboxError, ServerRefused
from outbox_plugin.inbox.cleaning import Keep
from outbox_plugin.inbox.consumer_config import consumer_config
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.events import ignore
from outbox_plugin.inbox.handling import Handling
from outbox_plugin.inbox.handover import Handover, Unlock
from outbox_plugin.inbox.housekeeping import Housekeeping
from outbox_plugin.inbox.kafka_records import committed_offset, received_from
from outbox_plugin.inbox.key_queues import KeyQueues, PartitionPosition
from outbox_plugin.inbox.leader_epochs import Finding, LeaderEpochs, StartPosition
from outbox_plugin.inbox.pauses import Pauses
from outbox_plugin.inbox.positions import ANSWER_SECONDS, AllReached, FoundPositions, Positions, Reached, find_positions
from outbox_plugin.inbox.readiness import Facts
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Retry
from outbox_plugin.inbox.session import AsyncBatchHandler, AsyncHandler, BatchHandler, Handler, HandlerSession
from outbox_plugin.inbox.start_check import check_servers
from outbox_plugin.inbox.workers import TaskWorkers, ThreadWorkers, make_workers
from outbox_plugin.observe.metrics_extra import metrics_extra
from outbox_plugin.observe.tracing import configured_tracer
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import one_line
from outbox_plugin.settings import Settings
from outbox_plugin.threads.background import Background

if TYPE_CHECKING:  # It needs an extra.
    from outbox_plugin.inbox.observed import ObservedInbox

logger = logger_of("outbox_plugin.inbox")

POLL_SECONDS = 0.1
POLL_RECORDS = 1_000
# Records in memory. `room` shares them out among the partitions: one alone has half, which is enough for four workers
# with batches of 2,000.
MAX_HELD_RECORDS = 20_000
MAX_HELD_BYTES = 64_000_000  # The same bound for their memory.
ROOM_SECONDS = 0.5  # How long it waits for room before it pauses: a pause drops what librdkafka has fetched ahead.
COMMIT_SECONDS = 0.5
RELEASE_SECONDS = 20.0
ASK_SECONDS = 1.0  # The wait before it asks again for the positions of partitions that were assigned.
# A record that is polled again may wait so long for its turn. Its key may be forgotten meanwhile.
QUEUED_SECONDS = 3_600.0
BEFORE_THE_POSITION = -1  # Stands for an offset.
UNKNOWN_ID_SECONDS = 0.2  # The wait before records are fetched again whose topic's id Kafka did not return.
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
            settings: Kafka, and the database of the effects, in which `outbox migrate` has made the inbox's tables. If
                `listen` is set, metrics and probes are served there while the inbox runs.
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
        self._pauses = Pauses(self._dispatcher)
        self._without_position: set[TopicPartition] = set()
        self._ask_at = 0.0
        self._next: dict[TopicPartition, int] = {}
        self._epochs = LeaderEpochs()
        self._reached: AllReached = {}  # Replaced, never changed: housekeeping writes it.
        self._positions: Positions
        self._polled_at: float | None = None
        self._positions_at: float | None = None  # When all partitions last had their positions.
        self._observed: ObservedInbox | None = None  # Where there is OUTBOX_LISTEN.

    @property
    def partitions(self) -> list[TopicPartition]:
        """The partitions that this process handles now, as named tuples of topic and partition."""
        return self._dispatcher.locked(KeyQueues.partitions)

    def stop(self) -> None:
        """Finish what is under way, and end; returns when everything is closed. See `Background.stop`."""
        super().stop()
        self._close_port()

    def _prepare(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[], None]:
        if self._settings.listen is not None:
            self._observed = self._listen(self._settings.listen)
        try:
            self._check()
            self._topic_ids = TopicIds(self._settings)
            workers = self._workers(loop)
            if self._observed is not None:
                self._observed.poll_lag()
            return partial(self._consume, self._consumer(), workers)
        except BaseException:
            self._close_port()
            raise

    def _listen(self, listen: str) -> ObservedInbox:
        with metrics_extra():
            from outbox_plugin.inbox.observed import ObservedInbox
        return ObservedInbox(
            self._settings,
            listen,
            self._group,
            self._topics,
            error=lambda: self._error,
            stopping=self._stop.is_set,
            facts=self._facts,
            next_offsets=lambda: self._dispatcher.locked(KeyQueues.next_offsets),
            paused=lambda: self._pauses.count,
        )

    def _facts(self) -> Facts:
        return Facts(
            polled_at=self._polled_at,
            positions_at=self._positions_at,
            progress=self._dispatcher.progress(),
            partitions=len(self.partitions),
        )

    def _close_port(self) -> None:
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.close()

    def _check(self) -> None:
        self._settings, self._positions = check_servers(self._settings, self._group)
        self._handover = Handover(self._settings, self._group)

    def _workers(self, loop: asyncio.AbstractEventLoop | None) -> ThreadWorkers | TaskWorkers:
        handling = Handling(
            self._settings.table,
            self._group,
            self._retry,
            random.random,
            in_batches=self._in_batches,
            observe=ignore if self._observed is None else self._observed.observe,
        )
        return make_workers(
            self._settings, self._dispatcher, handling, self._handler, self._concurrency, loop, traced=self._tracing()
        )

    def _tracing(self) -> Callable[[HandlerSession], HandlerSession]:
        """What makes a session trace its handler; it leaves the session as it is where OpenTelemetry has no tracer."""
        if (tracer := configured_tracer()) is None:
            return lambda session: session
        from outbox_plugin.inbox.traced_session import TracedSession

        return partial(TracedSession, tracer=tracer, group=self._group)

    def _consumer(self) -> Consumer:
        try:
            consumer = Consumer(consumer_config(self._settings, self._group))
        except KafkaException as error:
            raise refused_property(error) from None
        with ExitStack() as opened:
            opened.callback(consumer.close)
            consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
            opened.pop_all()
        return consumer

    def _consume(self, consumer: Consumer, workers: ThreadWorkers | TaskWorkers) -> None:
        housekeeping = Housekeeping(
            self._settings,
            self._group,
            self._dispatcher,
            self._positions,
            lambda: self._reached,
            self._keep,
            self._observed,
        )
        with ExitStack() as ended, closing(consumer):  # Whatever a step raises, Kafka's client is closed.
            workers.start()
            ended.callback(workers.join)
            ended.callback(self._dispatcher.stop)
            housekeeping.start()
            try:
                self._poll(consumer, workers)
            finally:
                self._hand_over(consumer, housekeeping, ended)

    def _poll(self, consumer: Consumer, workers: ThreadWorkers | TaskWorkers) -> None:
        committed_at = time.monotonic()
        while not self._stop.is_set():
            if workers.error is not None:
                raise OutboxError(f"a handler's worker has ended: {one_line(workers.error)}") from workers.error
            self._polled_at = time.monotonic()
            if not self._without_position:
                self._positions_at = self._polled_at
            self._take_in(consumer)
            self._start_waiting(consumer)
            self._pauses.update(consumer, Room(MAX_HELD_RECORDS, MAX_HELD_BYTES), ROOM_SECONDS)
            self._begin_anew(
                consumer,
                self._topic_ids.recreated({topic for topic, _ in self._dispatcher.locked(KeyQueues.partitions)}),
            )
            if time.monotonic() - committed_at > COMMIT_SECONDS:
                self._commit(consumer, self._dispatcher.locked(KeyQueues.committable), wait=False)
                self._note_positions(self._dispatcher.locked(KeyQueues.positions))
                committed_at = time.monotonic()

    def _hand_over(self, consumer: Consumer, housekeeping: Housekeeping, ended: ExitStack) -> None:
        """Give up all partitions. Those whose records are being handled stay locked until `ended`."""
        housekeeping.stop()
        self._dispatcher.stop()
        busy = self._dispatcher.locked(KeyQueues.busy)
        unlock = ended.enter_context(self._handover.locked(busy))
        ended.callback(self._wait_for_handlers, busy, unlock)
        positions = self._dispatcher.locked(KeyQueues.positions)
        reached = self._dispatcher.release(self._dispatcher.locked(KeyQueues.partitions), 0)
        self._commit(consumer, reached, wait=True)
        # Before the partitions go to their next owner, who may write greater positions.
        self._note_positions(
            {tp: at._replace(next_offset=reached.get(tp, at.next_offset)) for tp, at in positions.items()}
        )
        if housekeeping.wait_until_ended():
            self._positions.write_now(lambda: self._reached)

    def _wait_for_handlers(self, busy: Mapping[TopicPartition, Callable[[], bool]], unlock: Unlock) -> None:
        """Leave each busy partition to its next owner when its handlers have ended, but no later than at a rebalance.

        A handler that still runs then keeps its transaction. The next owner waits for that, and leaves the event out.
        """
        left, deadline = dict(busy), time.monotonic() + RELEASE_SECONDS
        while left and (ended := self._dispatcher.wait_for_some(left, deadline - time.monotonic())):
            unlock(ended)
            left = {tp: is_running for tp, is_running in left.items() if tp not in ended}

    def _note_positions(self, positions: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Note which positions are to be written to Postgres, with their epochs, which only this thread knows."""
        self._reached = {
            tp: Reached(at.topic_id, self._epochs.position(tp, at.next_offset)) for tp, at in positions.items()
        }

    def _take_in(self, consumer: Consumer) -> None:
        """Poll, and add the records. The first is added before the second call, which may run a rebalance."""
        if (first := consumer.poll(POLL_SECONDS)) is None:
            return
        self._add(consumer, [first])
        room = Room(MAX_HELD_RECORDS, MAX_HELD_BYTES)
        if records := room.records_to_poll(self._dispatcher.locked(KeyQueues.load), POLL_RECORDS):
            self._add(consumer, consumer.consume(records, 0))

    def _add(self, consumer: Consumer, messages: Sequence[Message]) -> None:
        good = [message for message in messages if (error := message.error()) is None or self._noted(error)]
        polled = cast(list[Any], good)  # The stubs call these optional; a record has them.
        at = [(each.topic(), each.partition(), each.offset()) for each in polled]
        doubtful = {tp[0] for tp in at if self._goes_back(*tp) or not self._topic_ids.of(tp[0])}
        left_out = self._unconfirmed(consumer, doubtful, at)
        kept = [message for message in polled if message.topic() not in left_out]
        received = [received_from(message, self._topic_ids.of(message.topic())) for message in kept]
        # A key made of the topic's id is right only if Kafka returns the same id after the record has arrived.
        if unnamed := {record.topic for record in received if record.named_by_place} - doubtful:
            at = [(record.topic, record.partition, record.offset) for record in received]
            left_out = self._unconfirmed(consumer, unnamed, at)
            received = [record for record in received if record.topic not in left_out]
        self._dispatch(consumer, received)

    def _dispatch(self, consumer: Consumer, received: Sequence[Received]) -> None:
        """Queue the records to handle. A partition that was cut before its position is read from its beginning."""
        kept: list[Received] = []
        handled: set[int] = set()
        cut: dict[TopicPartition, int] = {}
        forgotten_at = time.time() - self._keep.handled.total_seconds() + QUEUED_SECONDS
        for record in received:
            tp = TopicPartition(record.topic, record.partition)
            if tp in cut:
                continue
            if self._epochs.goes_back(tp, record.offset):
                self._dispatcher.add(kept, handled)  # The position that was reached counts the records before this one.
                kept, handled = [], set()
                if not self._went_back(tp):
                    cut[tp] = record.offset
                    continue
            old = record.timestamp / 1000 < forgotten_at
            finding = self._epochs.add(tp, record.offset, record.leader_epoch, key_may_be_forgotten=old)
            if finding is Finding.CUT or (finding is Finding.GONE and self._is_cut(consumer, tp)):
                cut[tp] = BEFORE_THE_POSITION
                continue
            kept.append(record)
            if finding is Finding.HANDLED:
                handled.add(id(record))
        self._dispatcher.add(kept, handled)
        for tp in cut.keys() & {*self.partitions}:
            self._read_again(consumer, tp, cut[tp])

    def _went_back(self, tp: TopicPartition) -> bool:
        """Note that librdkafka reads a partition again that was cut. False if the position could not be written."""
        next_offset = self._dispatcher.locked(KeyQueues.next_offsets).get(tp)
        if next_offset is None:
            return True
        position = self._epochs.position(tp, next_offset)
        if not self._keep_position(tp, position):
            return False
        logger.warning("%s [%d] was cut: a part of it is read again", *tp)
        self._epochs.go_back(tp, position)
        return True

    def _read_again(self, consumer: Consumer, tp: TopicPartition, offset: int) -> None:
        """Read a partition that was cut before its position again: from its beginning.

        If its position could not be written, ask for the same record again; so it is noticed again.
        """
        started = self._epochs.started_at(tp)
        if offset == BEFORE_THE_POSITION and self._keep_position(tp, started):
            logger.warning("%s [%d] was cut before the group's position: it is read from its beginning", *tp)
            self._epochs.start_over(tp)
            self._seek_to_beginning(consumer, tp)
            return
        first = self._epochs.start(tp, started) if offset == BEFORE_THE_POSITION else offset
        self._next.pop(tp, None)
        consumer.seek(KafkaTopicPartition(*tp, OFFSET_BEGINNING if first is None else first))
        self._stop.wait(UNKNOWN_ID_SECONDS)

    def _keep_position(self, tp: TopicPartition, position: StartPosition) -> bool:
        """Write a position before the partition is read again, so that old records are left out after a restart, too.

        Returns False if the database is away.
        """
        self._reached = {**self._reached, tp: Reached(self._topic_ids.of(tp.topic), position)}
        return self._positions.write_now(lambda: self._reached)

    def _is_cut(self, consumer: Consumer, tp: TopicPartition) -> bool:
        """Whether a partition was cut whose last handled record is gone. If Kafka does not answer, it counts as cut."""
        try:
            beginning, _ = consumer.get_watermark_offsets(KafkaTopicPartition(*tp), ANSWER_SECONDS)
        except KafkaException:
            return True
        return self._epochs.is_cut(tp, beginning)

    def _seek_to_beginning(self, consumer: Consumer, tp: TopicPartition) -> None:
        topic_ids = self._topic_ids.known()
        self._dispatcher.locked(lambda queues: queues.assign([tp], topic_ids))
        self._next.pop(tp, None)
        consumer.seek(KafkaTopicPartition(*tp, OFFSET_BEGINNING))

    def _unconfirmed(self, consumer: Consumer, topics: Collection[str], at: Sequence[tuple[str, int, int]]) -> set[str]:
        """Ask Kafka for the ids of topics, and seek back where it does not answer, to the lowest offset in `at`.

        Returns the topics whose records must be left out, because they come again.
        """
        if not topics:
            return set()
        answer = self._topic_ids.look_up(topics)
        self._begin_anew(consumer, answer.recreated)
        silent = {*topics} - answer.known
        if silent:
            logger.warning("records of %s wait until Kafka returns the id of the topic", ", ".join(sorted(silent)))
            lowest: dict[TopicPartition, int] = {}
            for topic, partition, offset in at:
                if topic in silent:
                    tp = TopicPartition(topic, partition)
                    lowest[tp] = min(offset, lowest.get(tp, offset))
            for tp, offset in lowest.items():
                self._seek_back(consumer, tp, offset)
            self._stop.wait(UNKNOWN_ID_SECONDS)
        return answer.recreated | silent

    def _seek_back(self, consumer: Consumer, tp: TopicPartition, offset: int) -> None:
        """Have records fetched again from an offset on.

        librdkafka forgets with a seek which epoch it has read, and notices no cut before that offset. So the record
        before it is fetched again, too, and compared. Where the offset itself shows a cut, it shows it again.
        """
        self._next.pop(tp, None)
        if not self._epochs.goes_back(tp, offset):
            first = self._epochs.start(tp, self._epochs.position(tp, offset))
            offset = offset if first is None else first
        with suppress(KafkaException):  # The partition is not ours any more.
            consumer.seek(KafkaTopicPartition(*tp, offset))

    def _goes_back(self, topic: str, partition: int, offset: int) -> bool:
        """Whether a record's offset is below the next one of its partition, so that the topic may be another one."""
        tp = TopicPartition(topic, partition)
        expected, self._next[tp] = self._next.get(tp, 0), offset + 1
        return offset < expected

    def _begin_anew(self, consumer: Consumer, topics: Collection[str]) -> None:
        """Read topics from their beginning that were deleted and recreated."""
        partitions = [tp for tp in self._dispatcher.locked(KeyQueues.partitions) if tp.topic in topics]
        if not partitions:
            return
        logger.warning("the topic %s was recreated, and is read from its beginning", ", ".join(sorted(topics)))
        self._dispatcher.release(partitions, RELEASE_SECONDS)
        for tp in partitions:
            self._epochs.start(tp, None)
            self._seek_to_beginning(consumer, tp)

    def _noted(self, error: KafkaError) -> bool:
        """Log an error that a poll returned. Raises ServerRefused if waiting cannot mend it. Returns False always."""
        if error.fatal() or error.code() in _REFUSED:
            raise ServerRefused(str(connection_error(error, self._settings)))
        (logger.warning if error.code() in _WAITED_FOR else logger.info)("Kafka, while consuming: %s", error.str())
        return False

    def _commit(self, consumer: Consumer, reached: dict[TopicPartition, int], *, wait: bool) -> None:
        """Commit offsets. A failure costs work only: events that are delivered again are left out."""
        if not reached:
            return
        offsets = [
            committed_offset(tp, StartPosition(offset, self._epochs.before(tp, offset)), self._topic_ids.of(tp.topic))
            for tp, offset in reached.items()
        ]
        try:
            if wait:
                consumer.commit(offsets=offsets, asynchronous=False)
            else:
                consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            logger.info("offsets were not committed: %s", error.args[0].str())

    def _assigned(self, consumer: Consumer, partitions: list[KafkaTopicPartition]) -> None:
        assigned = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._start_at(consumer, assigned, self._find_positions(consumer, assigned))

    def _find_positions(self, consumer: Consumer, partitions: Collection[TopicPartition]) -> FoundPositions:
        def look_up(topics: Collection[str]) -> dict[str, str]:
            answer = self._topic_ids.look_up(topics)
            self._begin_anew(consumer, answer.recreated)  # Only partitions that are ours already.
            return {topic: self._topic_ids.of(topic) for topic in answer.known}

        found = {} if self._stop.is_set() else find_positions(self._positions, consumer, partitions, look_up)
        return {} if self._stop.is_set() else found  # An inbox that stops must handle none of their records.

    def _start_at(self, consumer: Consumer, partitions: Collection[TopicPartition], found: FoundPositions) -> None:
        """Fetch partitions from the positions that were found. The other partitions wait, paused, for theirs."""
        offsets = []
        for tp in partitions:
            self._next.pop(tp, None)
            # Not Kafka's own offset, which may be of an older topic.
            first = self._epochs.start(tp, found.get(tp))
            beginning = OFFSET_BEGINNING if tp in found else OFFSET_END
            offsets.append(KafkaTopicPartition(*tp, beginning if first is None else first))
        topic_ids, next_offsets = self._topic_ids.known(), {tp: at.next_offset for tp, at in found.items() if at}
        self._dispatcher.locked(lambda queues: queues.assign(found, topic_ids, next_offsets))
        consumer.incremental_assign(offsets)
        self._pauses.resume(consumer, found)
        self._without_position.update(tp for tp in partitions if tp not in found)
        self._pauses.pause(consumer, self._without_position)

    def _start_waiting(self, consumer: Consumer) -> None:
        """Ask again for the positions of partitions that wait; slow answers take at most a fifth of the time."""
        began = time.monotonic()
        if not self._without_position or began < self._ask_at:
            return
        found = self._find_positions(consumer, self._without_position)
        self._ask_at = time.monotonic() + max(ASK_SECONDS, 4 * (time.monotonic() - began) if self.partitions else 0.0)
        if found:
            self._without_position.difference_update(found)
            consumer.incremental_unassign([KafkaTopicPartition(*tp) for tp in found])
            self._start_at(consumer, found, found)

    def _revoked(self, consumer: Consumer, partitions: list[KafkaTopicPartition]) -> None:
        self._commit(consumer, self._give_up(partitions, RELEASE_SECONDS), wait=True)
        consumer.incremental_unassign(partitions)

    def _lost(self, consumer: Consumer, partitions: list[KafkaTopicPartition]) -> None:
        self._give_up(partitions, 0)
        consumer.incremental_unassign(partitions)

    def _give_up(self, partitions: list[KafkaTopicPartition], patience_seconds: float) -> dict[TopicPartition, int]:
        given_up = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._without_position.difference_update(given_up)
        reached = self._dispatcher.release(given_up, patience_seconds)
        self._note_positions(self._dispatcher.locked(KeyQueues.positions))
        return reached
