"""Reads partitions once, each in its order, and leaves out no record if one of them is cut meanwhile.

When librdkafka hears that a partition was cut, as by an unclean election of its leader, it goes on at the cut, and
drops what it has fetched: also records from before the cut that nobody has polled. So where the epoch of the records
rises, or the end of a partition falls, the record that was read last is read again, and compared
(`core.leader_epochs`). If it is the same, those that follow it are read now. If not, what was read is not what Kafka
has, so the reading fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.core.leader_epochs import Finding, GroupPosition, LeaderEpochs
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import LogUnavailable


class CutWhileRead(LogUnavailable):
    """A partition was cut while it was read: read it again."""


@dataclass(slots=True)
class _Run:
    """Records of one epoch that were read one after the other: none of them can follow a cut."""

    epoch: int
    next_offset: int


class UncutReading:
    """What a consumer polls of one topic."""

    def __init__(self, consumer: Consumer, topic: str, starts: Mapping[int, int]) -> None:
        """Nothing is polled yet.

        Args:
            consumer: has `enable.partition.eof`, and begins to read the partitions.
            topic: its name.
            starts: the offset from which each partition is read.
        """
        self._consumer = consumer
        self._topic = topic
        self._epochs = LeaderEpochs()
        self._read = {TopicPartition(topic, partition) for partition in starts}
        for partition, start in starts.items():
            self._epochs.start(TopicPartition(topic, partition), GroupPosition(start))
        self._runs: dict[int, _Run] = {}  # By partition, the one that goes on. `_epochs` has its first record.

    def end(self, partition: int) -> None:
        """Return no more of a partition."""
        self._runs.pop(partition, None)
        self._read.discard(TopicPartition(self._topic, partition))

    def consume(self, most: int, seconds: float) -> Iterator[Message]:
        """Poll, and yield the records, and what the client reports, of the partitions that have not ended.

        Args:
            most: how many messages to poll.
            seconds: how long to wait for them.

        Raises:
            CutWhileRead: a record that was read is not in Kafka any more.
            KafkaException: the client refuses.
        """
        sought: set[TopicPartition] = set()  # Their records come again.
        messages = self._consumer.consume(most, seconds)
        for partition in self._runs:
            tp = TopicPartition(self._topic, partition)
            self._epochs.note_end(tp, self._watermarks(tp)[1])
        for message in messages:
            if self._goes_on(message) or self._is_next(message, sought):
                yield message

    def _goes_on(self, message: Message) -> bool:
        """Whether this is a record that goes on with its partition's run. Almost all do, and need no other check."""
        run, offset = self._runs.get(message.partition() or 0), message.offset() or 0
        if run is None or message.error() is not None or offset < run.next_offset:
            return False
        if message.leader_epoch() != run.epoch:
            return False
        run.next_offset = offset + 1
        return True

    def _is_next(self, message: Message, sought: set[TopicPartition]) -> bool:
        """Whether a message comes next. A partition whose record or end may follow a cut is `sought` from then on."""
        tp, offset, error = self._partition(message), message.offset() or 0, message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            return True
        if tp not in self._read or tp in sought:
            return False
        if (run := self._runs.pop(tp.partition, None)) is not None:
            self._epochs.add(tp, run.next_offset - 1, run.epoch)
        if self._may_follow_cut(tp, message, *self._watermarks(tp)):
            sought.add(tp)
            self._consumer.seek(KafkaTopicPartition(*tp, self._epochs.fetch_again(tp, offset)))
            return False
        return error is not None or self._is_new(tp, message)

    def _watermarks(self, tp: TopicPartition) -> tuple[int, int]:
        """Where a partition began and ended when it was last fetched. That asks no broker."""
        beginning, end = self._consumer.get_watermark_offsets(KafkaTopicPartition(*tp), cached=True)
        return beginning, end

    def _partition(self, message: Message) -> TopicPartition:
        return TopicPartition(message.topic() or self._topic, message.partition() or 0)

    def _may_follow_cut(self, tp: TopicPartition, message: Message, beginning: int, end: int) -> bool:
        """Whether a record, or the end of a partition, may stand behind others that were not read."""
        offset = message.offset() or 0
        if message.error() is not None:
            return self._epochs.may_end_at_cut(tp, offset, end)
        self._epochs.note_end(tp, end)
        if self._epochs.goes_back(tp, offset):
            raise self._cut(tp)
        return self._epochs.may_follow_cut(tp, offset, message.leader_epoch(), lambda _: beginning)

    def _is_new(self, tp: TopicPartition, message: Message) -> bool:
        """Whether a record was not read before."""
        offset, epoch = message.offset() or 0, message.leader_epoch()
        finding = self._epochs.add(tp, offset, epoch)
        if finding in (Finding.CUT, Finding.GONE):
            raise self._cut(tp)
        if epoch is not None:
            self._runs[tp.partition] = _Run(epoch, offset + 1)
        return finding is Finding.NEW

    @staticmethod
    def _cut(tp: TopicPartition) -> CutWhileRead:
        return CutWhileRead(f"Kafka: the partition {tp.partition} of {tp.topic} was cut while it was read")
