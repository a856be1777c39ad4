"""Reads partitions again that were truncated, or whose topics were deleted and recreated."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.leader_epochs import GroupPosition, LeaderEpochs
from outbox_plugin.core.topic_partition import TopicPartition, topic_partition
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.positions import ANSWER_SECONDS
from outbox_plugin.inbox.reached_positions import ReachedPositions
from outbox_plugin.inbox.unread_deletions import UnreadDeletions
from outbox_plugin.printable import logger_of

logger = logger_of("outbox_plugin.inbox")

UNKNOWN_ID_SECONDS = 0.2  # The wait before records are fetched again whose topic's id Kafka did not return.


class Rereader:
    """Knows which offset of each partition comes next, and seeks back. Only the thread that polls may use it."""

    def __init__(
        self,
        consumer: Consumer,
        dispatcher: Dispatcher,
        topic_ids: TopicIds,
        epochs: LeaderEpochs,
        reached: ReachedPositions,
        unread: UnreadDeletions,
        stop: threading.Event,
    ) -> None:
        """Nothing was read yet.

        Args:
            consumer: has the partitions.
            dispatcher: has their records that wait for handlers.
            topic_ids: of the topics that are consumed.
            epochs: which leader wrote the records, as far as they were read.
            reached: the positions that are to be written.
            unread: is told where each partition is read from.
            stop: ends a wait.
        """
        self._consumer = consumer
        self._dispatcher = dispatcher
        self._topic_ids = topic_ids
        self._epochs = epochs
        self._reached = reached
        self._unread = unread
        self._stop = stop
        self._next: dict[TopicPartition, int] = {}
        self._silent: set[str] = set()  # The topics whose ids Kafka did not return when it was last asked here.

    def start(self, tp: TopicPartition, position: GroupPosition | None) -> int | None:
        """Expect the records of a partition from a position on. Returns the offset to fetch; None for the beginning."""
        self._next.pop(tp, None)
        self._unread.start(tp, None if position is None else position.next_offset)
        return self._epochs.start(tp, position)

    def doubtful(self, places: Sequence[tuple[str, int, int]]) -> set[str]:
        """Take note of records that were fetched, by topic, partition and offset. Returns the topics in doubt.

        Where an offset is below the expected one, the topic may be another one. A topic whose id Kafka did not return
        stays in doubt when its records are fetched again.
        """
        topics = {topic for topic, _, _ in places}
        doubtful = {topic for topic in topics if topic in self._silent or not self._topic_ids.of(topic)}
        for topic, partition, offset in places:
            tp = topic_partition(topic, partition)
            if offset < self._next.get(tp, 0):
                doubtful.add(topic)
            self._next[tp] = offset + 1
        return doubtful

    def unconfirmed(self, topics: Collection[str], places: Sequence[tuple[str, int, int]]) -> set[str]:
        """Ask Kafka for the ids of topics, and seek back where it does not answer, to the lowest offset of `places`.

        Returns the topics whose records must be left out, because they come again.
        """
        if not topics:
            return set()
        answer = self._topic_ids.look_up(topics)
        self.restart(answer.recreated)
        silent = {*topics} - answer.known
        self._silent = (self._silent - answer.known) | silent
        if silent:
            logger.warning("records of %s wait until Kafka returns the id of the topic", ", ".join(sorted(silent)))
            lowest: dict[TopicPartition, int] = {}
            for topic, partition, offset in places:
                if topic in silent:
                    tp = TopicPartition(topic, partition)
                    lowest[tp] = min(offset, lowest.get(tp, offset))
            for tp, offset in lowest.items():
                self._seek_back(tp, offset)
            self._stop.wait(UNKNOWN_ID_SECONDS)
        return answer.recreated | silent

    def restart(self, topics: Collection[str]) -> None:
        """Read topics from their beginning that were deleted and recreated."""
        partitions = [tp for tp in self._dispatcher.locked(KeyQueues.partitions) if tp.topic in topics]
        if not partitions:
            return
        logger.warning("the topic %s was recreated, and is read from its beginning", ", ".join(sorted(topics)))
        for tp in partitions:
            self._epochs.start(tp, None)
            self._seek_to_beginning(tp)

    def note_truncation(self, tp: TopicPartition) -> bool:
        """Note that librdkafka reads a truncated partition again. False if the position could not be written."""
        position = self._position(tp)
        if not self._reached.keep(tp, position):
            return False
        logger.warning("%s [%d] was truncated: a part of it is read again", *tp)
        self._epochs.note_truncation(tp, position)
        return True

    def read_from_beginning(self, tp: TopicPartition) -> None:
        """Read a partition again that was truncated before its position.

        If its position could not be written, ask for the same record again; so the truncation is noticed again.
        """
        position = self._position(tp)
        if not self._reached.keep(tp, position):
            self.read_again(tp, self._epochs.compare_again(tp))
            return
        logger.warning("%s [%d] was truncated before the group's position: it is read from its beginning", *tp)
        self._epochs.restart(tp, position)
        self._seek_to_beginning(tp)

    def read_again(self, tp: TopicPartition, offset: int) -> None:
        """Ask for a record again, after a moment, which showed a truncation that could not be noted."""
        self._seek(tp, offset)
        self._stop.wait(UNKNOWN_ID_SECONDS)

    def look_for_truncation(self, tp: TopicPartition, offset: int) -> None:
        """Ask again for a record that may follow a truncation, and for the one before it, which is compared."""
        logger.info("%s [%d]: the record before the offset %d is fetched again, and compared", *tp, offset)
        self._seek_back(tp, offset)

    def is_truncated(self, tp: TopicPartition) -> bool:
        """Whether a partition whose last handled record is gone was truncated; also if Kafka does not answer."""
        try:
            beginning, _ = self._consumer.get_watermark_offsets(KafkaTopicPartition(*tp), ANSWER_SECONDS)
        except KafkaException:
            return True
        return self._epochs.is_truncated(tp, beginning)

    def _position(self, tp: TopicPartition) -> GroupPosition:
        """Return up to where the group has handled a partition."""
        next_offset = self._dispatcher.locked(KeyQueues.next_offsets).get(tp)
        return self._epochs.started_at(tp) if next_offset is None else self._epochs.position(tp, next_offset)

    def _seek_to_beginning(self, tp: TopicPartition) -> None:
        topic_id = self._topic_ids.of(tp.topic)
        self._dispatcher.locked(lambda queues: queues.restart(tp, topic_id))
        self._unread.start(tp, None)
        self._seek(tp, OFFSET_BEGINNING)

    def _seek_back(self, tp: TopicPartition, offset: int) -> None:
        """Have records fetched again from an offset on.

        librdkafka forgets with a seek which epoch it has read, and notices no truncation before that offset. So the
        record before it is fetched again, too, and compared. Where the offset itself shows a truncation, it shows it
        again.
        """
        if not self._epochs.goes_back(tp, offset):
            offset = self._epochs.fetch_again(tp, offset)
        self._seek(tp, offset)

    def _seek(self, tp: TopicPartition, offset: int) -> None:
        """Fetch a partition from an offset on, unless it is not ours any more.

        librdkafka refuses a seek ("Erroneous state") until it has begun to fetch a partition that was assigned. To go
        on as if it had obeyed would pass over records, so such a partition is assigned anew.
        """
        self._next.pop(tp, None)
        at = KafkaTopicPartition(*tp, offset)
        try:
            self._consumer.seek(at)
        except KafkaException:
            if tp in self._dispatcher.locked(KeyQueues.partitions):
                self._consumer.incremental_unassign([at])
                self._consumer.incremental_assign([at])
