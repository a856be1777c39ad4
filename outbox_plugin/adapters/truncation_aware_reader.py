"""Reads partitions once, each in its order, and leaves out no record if one of them is truncated meanwhile.

When librdkafka hears that a partition was truncated, as by an unclean election of its leader, it goes on at the new
end, and drops what it has fetched: also records from before the truncation that nobody has polled. So where the epoch
of the records rises, or a partition ends behind offsets that held no record, the record that was read last is read
again, and compared (`core.leader_epochs`). If it is the same, those that follow it are read now. If not, what was read
is not what Kafka has, so the reading fails. If retention has deleted it meanwhile, the partition is read on from its
beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from confluent_kafka import Consumer, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.fetched_watermarks import fetched_watermarks
from outbox_plugin.core.leader_epochs import Finding, GroupPosition, LeaderEpochs
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import LogUnavailable


class TruncatedWhileRead(LogUnavailable):
    """A partition was truncated while it was read: read it again."""


class TruncationAwareReader:
    """What a consumer polls of one topic."""

    def __init__(self, consumer: Consumer, topic: str, starts: Mapping[int, int]) -> None:
        """Nothing is polled yet.

        Args:
            consumer: has `enable.partition.eof`, and begins to read the partitions.
            topic: its name.
            starts: the offset from which each partition is read.
        """
        self._consumer = consumer
        self._epochs = LeaderEpochs()
        self._read = {partition: TopicPartition(topic, partition) for partition in starts}
        for partition, start in starts.items():
            self._epochs.start(self._read[partition], GroupPosition(start))

    def end(self, partition: int) -> None:
        """Return no more of a partition."""
        self._read.pop(partition, None)

    def consume(self, most: int, seconds: float) -> Iterator[Message]:
        """Poll, and yield the records, and what the client reports, of the partitions that have not ended.

        Args:
            most: how many messages to poll.
            seconds: how long to wait for them.

        Raises:
            TruncatedWhileRead: a record that was read is not in Kafka any more.
            KafkaException: the client refuses.
        """
        sought: set[TopicPartition] = set()  # Their records come again.
        for message in self._consumer.consume(most, seconds):
            if self._is_next(message, sought):
                yield message

    def _is_next(self, message: Message, sought: set[TopicPartition]) -> bool:
        """Whether a message comes next. A partition that may have been truncated before it is `sought` from then on."""
        offset, error = message.offset() or 0, message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            return True
        tp = self._read.get(message.partition() or 0)
        if tp is None or tp in sought:
            return False
        if error is None and self._epochs.goes_on(tp, offset, message.leader_epoch()):
            return True
        if self._may_follow_truncation(tp, message):
            sought.add(tp)
            self._consumer.seek(KafkaTopicPartition(*tp, self._epochs.fetch_again(tp, offset)))
            return False
        finding = self._finding(tp, message)
        if finding is Finding.GONE:
            sought.add(tp)
            self._consumer.seek(KafkaTopicPartition(*tp, self._begin_anew(tp)))
        return finding is Finding.NEW

    def _may_follow_truncation(self, tp: TopicPartition, message: Message) -> bool:
        """Whether a record, or the end of a partition, may stand behind others that were not read."""
        offset = message.offset() or 0
        if message.error() is not None:
            return self._epochs.may_have_dropped(tp, offset)
        if self._epochs.goes_back(tp, offset):
            raise self._truncated(tp)
        return self._epochs.may_follow_truncation(tp, offset, message.leader_epoch(), self._beginning)

    def _beginning(self, tp: TopicPartition) -> int:
        return fetched_watermarks(self._consumer, tp)[0]

    def _finding(self, tp: TopicPartition, message: Message) -> Finding:
        """What a record shows, or the end of a partition: that is new, unless the record that was read last is gone."""
        offset = message.offset() or 0
        if message.error() is not None:
            return Finding.GONE if self._epochs.has_lost(tp, offset) else Finding.NEW
        finding = self._epochs.add(tp, offset, message.leader_epoch())
        if finding is Finding.TRUNCATED:
            raise self._truncated(tp)
        return finding

    def _begin_anew(self, tp: TopicPartition) -> int:
        """Return where a partition begins, if retention has deleted the record that was read last: none was read of it.

        Otherwise, the partition was truncated.
        """
        beginning = self._beginning(tp)
        if self._epochs.is_truncated(tp, beginning):
            raise self._truncated(tp)
        self._epochs.start(tp, GroupPosition(beginning))
        return beginning

    @staticmethod
    def _truncated(tp: TopicPartition) -> TruncatedWhileRead:
        return TruncatedWhileRead(f"Kafka: the partition {tp.partition} of {tp.topic} was truncated while it was read")
