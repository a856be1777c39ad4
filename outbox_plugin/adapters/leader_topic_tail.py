"""The last records of the leader topic, from which a harvester that starts learns who led before."""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import OFFSET_END, Consumer, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka_reader import beginnings, ends
from outbox_plugin.core.heartbeat_codec import LeaderRecord
from outbox_plugin.core.last_leader import TAIL_HEARTBEATS, LastLeader
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat

_ASK_SECONDS = 0.5


class LeaderTopicTail:
    """The records that were there when a consumer began to listen, a few of each partition.

    Attributes:
        starts: what to assign to the consumer. It then gets these records, and all later ones.
    """

    def __init__(self, consumer: Consumer, topic: str, partitions: Iterable[int]) -> None:
        """Ask Kafka for the partitions' bounds. If it does not answer in time, the consumer starts at the ends.

        It does so, too, where there are several partitions. Who led before matters for an only shard alone.

        Args:
            consumer: a new one.
            topic: the leader topic.
            partitions: their numbers.
        """
        self._unread: dict[int, range] = {}  # The offsets of each partition's records, until they have been read.
        self._last_leaders: dict[int, LastLeader] = {}
        self._vacant: set[int] = set()
        self.starts = ends(consumer, topic, partitions)
        if len(self.starts) == 1 and self.starts[0].offset != OFFSET_END:
            self._begin_before_the_ends(consumer, topic)

    def _begin_before_the_ends(self, consumer: Consumer, topic: str) -> None:
        try:
            firsts = beginnings(consumer, self.starts, _ASK_SECONDS)
        except KafkaException:
            return
        at_the_ends, self.starts = self.starts, []
        for each, first in zip(at_the_ends, firsts, strict=True):
            start = max(first, each.offset - TAIL_HEARTBEATS)
            self.starts.append(TopicPartition(topic, each.partition, start))
            if start < each.offset:
                self._unread[each.partition] = range(start, each.offset)
                self._last_leaders[each.partition] = LastLeader()
            else:  # It is empty.
                self._vacant.add(each.partition)

    def take(self, record: LeaderRecord, heartbeat: LeaderHeartbeat | None) -> bool:
        """Take in a record in its partition's order. Returns whether it was there when the consumer began to listen.

        Args:
            record: any.
            heartbeat: what it says; None unless it is a heartbeat of this outbox, and new.
        """
        if (offsets := self._unread.get(record.shard)) is None:
            return False
        last_leader, was_there = self._last_leaders[record.shard], record.offset in offsets
        if was_there and heartbeat is not None:
            last_leader.take(heartbeat)
        if record.offset not in offsets[:-1]:  # It is the last one, or there are none any more.
            del self._unread[record.shard], self._last_leaders[record.shard]
            if was_there and last_leader.has_resigned:
                self._vacant.add(record.shard)
        return was_there

    def take_vacant(self) -> set[int]:
        """The partitions that were found since the last call to have had no leader."""
        vacant, self._vacant = self._vacant, set()
        return vacant
