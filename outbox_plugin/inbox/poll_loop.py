"""Polls Kafka for an inbox, hands the records to the dispatcher, and commits the offsets of those that are done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from outbox_plugin.adapters.fetched_watermarks import fetched_watermarks
from outbox_plugin.adapters.kafka_clients import close_consumer, connection_error, is_fatal
from outbox_plugin.adapters.offset_commits import in_commits
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.leader_epochs import Finding, GroupPosition, LeaderEpochs
from outbox_plugin.core.memory_limit import MemoryLimit
from outbox_plugin.core.topic_partition import TopicPartition, topic_partition
from outbox_plugin.errors import OutboxError, ServerRefused
from outbox_plugin.inbox.assignments import Assignments
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.events import Observer, ignore
from outbox_plugin.inbox.kafka_records import committed_offset, received_from
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.pauses import Pauses
from outbox_plugin.inbox.positions import Positions
from outbox_plugin.inbox.reached_positions import ReachedPositions
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.rereader import Rereader
from outbox_plugin.inbox.unread_deletions import UnreadDeletions
from outbox_plugin.inbox.workers import TaskWorkers, ThreadWorkers
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.inbox")

POLL_SECONDS = 0.1
POLL_RECORDS = 1_000
# It is shared out among the partitions: one alone has half, which is enough for four workers with batches of 2,000.
MEMORY_LIMIT = MemoryLimit(records=20_000, size=64_000_000)
ROOM_SECONDS = 0.5  # How long it waits for room before it pauses: a pause drops what librdkafka has fetched ahead.
COMMIT_SECONDS = 0.5
COMMIT_ANSWER_SECONDS = 5.0
# A record that is polled again may wait so long for its turn. Its key may be forgotten meanwhile.
QUEUED_SECONDS = 3_600.0
_WARNED_OF = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}


class PollLoop:
    """Owns the Kafka consumer. Other threads may read `polled_at`, `positions_at` and `reached.all`."""

    def __init__(
        self,
        settings: Settings,
        group: str,
        consumer: Consumer,
        dispatcher: Dispatcher,
        pauses: Pauses,
        positions: Positions,
        topic_ids: TopicIds,
        remembered_seconds: float,
        stop: threading.Event,
        observe: Observer = ignore,
    ) -> None:
        """Nothing is consumed yet.

        Args:
            settings: whose servers an error names.
            group: the consumer group.
            consumer: of the group; `close` closes it.
            dispatcher: hands the records to the workers.
            pauses: the partitions that are not fetched for now.
            positions: where the group is, in Postgres.
            topic_ids: of the topics that are consumed.
            remembered_seconds: how long the keys of handled records are remembered.
            stop: ends the loop.
            observe: is called with what Kafka has deleted before it was read.
        """
        self._settings = settings
        self._group = group
        self._consumer = consumer
        self._dispatcher = dispatcher
        self._pauses = pauses
        self._topic_ids = topic_ids
        self._remembered_seconds = remembered_seconds
        self._stop = stop
        self._epochs = LeaderEpochs()
        self.reached = ReachedPositions(positions, topic_ids, self._epochs)
        self._unread = UnreadDeletions(self._low_watermark, observe)
        self._rereader = Rereader(consumer, dispatcher, topic_ids, self._epochs, self.reached, self._unread, stop)
        self._assignments = Assignments(
            consumer,
            dispatcher,
            pauses,
            positions,
            topic_ids,
            self.reached,
            self._rereader,
            stop,
            lambda reached: self._commit(reached, wait=True),
        )
        self.polled_at: float | None = None
        self.positions_at: float | None = None  # When all partitions last had their positions.

    def subscribe(self, topics: Sequence[str]) -> None:
        """Take part in the group.

        Raises:
            KafkaException: the client refuses.
        """
        self._consumer.subscribe(
            list(topics),
            on_assign=lambda _, partitions: self._assignments.assigned(partitions),
            on_revoke=lambda _, partitions: self._assignments.revoked(partitions),
            on_lost=lambda _, partitions: self._assignments.lost(partitions),
        )

    def run(self, workers: ThreadWorkers | TaskWorkers) -> None:
        """Consume until the inbox stops.

        Raises:
            OutboxError: a worker has ended.
            ServerRefused: Kafka refuses what waiting cannot mend.
        """
        committed_at = time.monotonic()
        while not self._stop.is_set():
            if workers.error is not None:
                raise OutboxError(f"a handler's worker has ended: {one_line(workers.error)}") from workers.error
            self.polled_at = time.monotonic()
            if self._assignments.all_have_positions:
                self.positions_at = self.polled_at
            self.take_in()
            self._assignments.start_waiting()
            self._pauses.update(self._consumer, MEMORY_LIMIT, ROOM_SECONDS)
            topics = {topic for topic, _ in self._dispatcher.locked(KeyQueues.partitions)}
            self._rereader.restart(self._topic_ids.recreated(topics))
            if time.monotonic() - committed_at > COMMIT_SECONDS:
                self.commit_and_note()
                committed_at = time.monotonic()

    def give_up_all(self) -> None:
        """Give up all partitions, with what is done of them committed."""
        positions = self._dispatcher.locked(KeyQueues.positions)
        reached = self._dispatcher.release(self._dispatcher.locked(KeyQueues.partitions), 0)
        self._commit(reached, wait=True)
        # Before the partitions go to their next owner, who may write greater positions.
        self.reached.note(
            {tp: at._replace(next_offset=reached.get(tp, at.next_offset)) for tp, at in positions.items()}
        )

    def close(self) -> None:
        """Leave the group, and disconnect; soon, though Kafka may not answer."""
        self._topic_ids.close()
        close_consumer(self._consumer)

    def commit_and_note(self) -> None:
        """Commit the offsets of what is done, without waiting for Kafka, and note the positions."""
        self._commit(self._dispatcher.locked(KeyQueues.committable), wait=False)
        self.reached.note(self._dispatcher.locked(KeyQueues.positions))

    def take_in(self) -> None:
        """Poll, and add the records. The first is added before the second call, which may run a rebalance."""
        if (first := self._consumer.poll(POLL_SECONDS)) is None:
            return
        self.add([first])
        if records := MEMORY_LIMIT.records_to_poll(self._dispatcher.locked(KeyQueues.load), POLL_RECORDS):
            self.add(self._consumer.consume(records, 0))

    def add(self, messages: Sequence[Message]) -> None:
        """Queue the records that a poll returned."""
        records: list[Any] = []  # The stubs call what a record has optional.
        ends: list[Any] = []
        for message in messages:
            if (error := message.error()) is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                ends.append(message)
            else:
                self._note(error)
        received, left_out = self._received(records)
        for tp in {topic_partition(record.topic, record.partition) for record in received}:
            self._epochs.note_end(tp, fetched_watermarks(self._consumer, tp)[1])
        self._dispatch(received)
        for end in ends:
            if end.topic() not in left_out:
                self._reached_end(TopicPartition(end.topic(), end.partition()), end.offset())

    def _reached_end(self, tp: TopicPartition, offset: int) -> None:
        """Take note that a partition was read to its end."""
        self._unread.reached(tp, offset, offset)
        if self._epochs.may_end_at_truncation(tp, offset, fetched_watermarks(self._consumer, tp)[1]):
            self._rereader.look_for_truncation(tp, offset)

    def _low_watermark(self, tp: TopicPartition) -> int:
        return fetched_watermarks(self._consumer, tp)[0]

    def _received(self, records: Sequence[Any]) -> tuple[list[Received], set[str]]:
        """Return the records of topics whose ids are certain, and the topics whose records come again."""
        places = [(each.topic(), each.partition(), each.offset()) for each in records]
        doubtful = self._rereader.doubtful(places)
        left_out = self._rereader.unconfirmed(doubtful, places)
        kept = [each for each in records if each.topic() not in left_out] if left_out else records
        received = [received_from(each, self._topic_ids.of) for each in kept]
        # A key made of the topic's id is right only if Kafka returns the same id after the record has arrived.
        if unnamed := {record.topic for record in received if record.named_by_place} - doubtful:
            places = [(record.topic, record.partition, record.offset) for record in received]
            left_out |= self._rereader.unconfirmed(unnamed, places)
            received = [record for record in received if record.topic not in left_out]
        return received, left_out

    def _dispatch(self, received: Sequence[Received]) -> None:
        """Queue the records to handle. A partition truncated before its position is read from its beginning."""
        kept: list[Received] = []
        handled: set[int] = set()
        reread: dict[TopicPartition, Callable[[], None]] = {}  # Their other records are passed over: they come again.
        forgotten_at = time.time() - self._remembered_seconds + QUEUED_SECONDS
        for record in received:
            tp = topic_partition(record.topic, record.partition)
            if tp in reread:
                continue
            if self._epochs.goes_on(tp, record.offset, record.leader_epoch):
                self._unread.reached(tp, record.offset, record.offset + 1)
                kept.append(record)
                continue
            if self._epochs.goes_back(tp, record.offset):
                self._dispatcher.add(kept, handled)  # The position that was reached counts the records before this one.
                kept, handled = [], set()
                if not self._rereader.note_truncation(tp):
                    reread[tp] = partial(self._rereader.read_again, tp, record.offset)
                    continue
            elif self._epochs.may_follow_truncation(tp, record.offset, record.leader_epoch, self._low_watermark):
                reread[tp] = partial(self._rereader.look_for_truncation, tp, record.offset)
                continue
            old = record.timestamp / 1000 < forgotten_at
            finding = self._epochs.add(tp, record.offset, record.leader_epoch, key_may_be_forgotten=old)
            if finding is Finding.TRUNCATED or (finding is Finding.GONE and self._rereader.is_truncated(tp)):
                reread[tp] = partial(self._rereader.read_from_beginning, tp)
                continue
            self._unread.reached(tp, record.offset, record.offset + 1)
            kept.append(record)
            if finding is Finding.HANDLED:
                handled.add(id(record))
        self._dispatcher.add(kept, handled)
        ours = {*self._dispatcher.locked(KeyQueues.partitions)}
        for tp in sorted(reread.keys() & ours):
            reread[tp]()

    def _note(self, error: KafkaError) -> None:
        """Log an error that a poll returned. Raises ServerRefused if waiting cannot mend it."""
        problem = connection_error(error, self._settings)
        if is_fatal(error) or isinstance(problem, ServerRefused):
            raise ServerRefused(str(problem))
        (logger.warning if error.code() in _WARNED_OF else logger.info)("Kafka, while consuming: %s", error.str())

    def _commit(self, reached: dict[TopicPartition, int], *, wait: bool) -> None:
        """Commit offsets. A failure costs work only: events that are delivered again are left out.

        To `wait` is to ask for an offset afterwards, for `COMMIT_ANSWER_SECONDS` at most: Kafka answers in the order of
        the requests. A commit that waits by itself does so for minutes if Kafka does not answer.
        """
        offsets = [
            committed_offset(tp, GroupPosition(offset, self._epochs.before(tp, offset)), self._topic_ids.of(tp.topic))
            for tp, offset in reached.items()
            if self._epochs.follows_a_record(tp, offset)
        ]
        for commit in in_commits(offsets, self._group):
            try:
                self._consumer.commit(offsets=commit, asynchronous=True)
            except KafkaException as error:
                logger.info("offsets were not committed: %s", error.args[0].str())
        if wait and offsets:
            try:
                self._consumer.committed(offsets[:1], COMMIT_ANSWER_SECONDS)
            except KafkaException as error:
                logger.info("offsets may not be committed: %s", error.args[0].str())
