"""Finds out whether a partition was cut before the position at which a group goes on.

After an unclean election of a leader, or a loss of power before a flush, other records stand at offsets that the group
has handled. They have a greater leader epoch (KIP-101). librdkafka asks the broker where an epoch ended (KIP-320) only
when the leader changes while it fetches, and not for a position that is assigned. So an inbox commits the epoch of the
last handled record with the offset, fetches that record again when it starts, and compares the epochs: two logs that
have the same epoch at one offset are the same up to there.

A partition that was cut is read from its beginning again, because nobody knows where the cut is. The inbox knows the
events that it has handled by their keys, but has forgotten the keys of old ones. The leader that was elected after the
cut has a greater epoch than the position. So an old record below the position counts as handled if its epoch is not
greater.

Where the last handled record is gone, a record after it that has a smaller epoch shows the cut. One that has a greater
epoch may also show it: no record can be fetched from an offset at which a transaction marker stands. Then the partition
counts as cut, unless retention has deleted the last handled record. A compacted partition may be read again needlessly.

Decides only; knows no thread and no server.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from outbox_plugin.core.topic_partition import TopicPartition


class StartPosition(NamedTuple):
    """Where a group goes on in a partition.

    Attributes:
        next_offset: the first offset that is not handled.
        leader_epoch: the leader epoch of the record before it; None if it is unknown.
    """

    next_offset: int
    leader_epoch: int | None = None


class Finding(Enum):
    """What a record that was fetched shows."""

    NEW = "the record follows the position"
    HANDLED = "the group has handled the record"
    CUT = "the partition was cut before the position"
    GONE = "the last record that was handled is gone; the record follows it, and has a greater epoch"


def compare(position: StartPosition, offset: int, leader_epoch: int | None) -> Finding:
    """Return what the first record shows that was fetched from the offset before a position.

    Args:
        position: the position, with an epoch.
        offset: the offset of the record. It is smaller than the one that was asked for if the partition ended before.
        leader_epoch: the record's epoch; None if Kafka does not return it.
    """
    last_handled = position.next_offset - 1
    if leader_epoch is None or position.leader_epoch is None:
        return Finding.HANDLED if offset == last_handled else Finding.NEW
    if offset == last_handled:
        return Finding.HANDLED if leader_epoch == position.leader_epoch else Finding.CUT
    if offset < last_handled or leader_epoch < position.leader_epoch:
        return Finding.CUT
    return Finding.GONE if leader_epoch > position.leader_epoch else Finding.NEW


def compare_again(position: StartPosition, offset: int, leader_epoch: int | None) -> Finding:
    """Return what an old record shows of a partition that was cut before a position. See `compare` for the arguments.

    Only for records whose keys may be forgotten: where a leader that was elected has records of its own, of an epoch
    before the position's, the keys tell them from those that were handled.
    """
    if leader_epoch is None or position.leader_epoch is None:
        return Finding.NEW
    handled = offset < position.next_offset and leader_epoch <= position.leader_epoch
    return Finding.HANDLED if handled else Finding.NEW


class LeaderEpochs:
    """The leader epochs of the records that were fetched. Only the thread that polls may use it."""

    def __init__(self) -> None:
        self._to_compare: dict[TopicPartition, StartPosition] = {}
        self._compared: dict[TopicPartition, StartPosition] = {}
        self._cut: dict[TopicPartition, StartPosition] = {}  # The positions of partitions that are read again.
        # The first offset of each epoch, ascending, as Kafka's brokers keep them.
        self._first_offsets: dict[TopicPartition, list[tuple[int, int | None]]] = {}

    def start(self, tp: TopicPartition, position: StartPosition | None) -> int | None:
        """Forget what was fetched of a partition, and return the offset to fetch from.

        Args:
            tp: the partition.
            position: where the group goes on; None for the partition's beginning, for which None is returned.
        """
        for positions in (self._to_compare, self._compared, self._cut):
            positions.pop(tp, None)
        self._first_offsets[tp] = []
        if position is None:
            return None
        if position.leader_epoch is None or position.next_offset == 0:
            return position.next_offset
        self._to_compare[tp] = position
        self._first_offsets[tp] = [(position.next_offset - 1, position.leader_epoch)]
        return position.next_offset - 1

    def start_over(self, tp: TopicPartition) -> None:
        """Do the same as `start`, for a partition that was cut and is read from its beginning."""
        position = self._compared.get(tp)
        self.start(tp, None)
        if position is not None:
            self._cut[tp] = position

    def add(
        self, tp: TopicPartition, offset: int, leader_epoch: int | None, *, key_may_be_forgotten: bool = False
    ) -> Finding:
        """Remember the epoch of a record that was fetched, and return what the record shows.

        Args:
            tp: the record's partition.
            offset: the record's offset.
            leader_epoch: the record's epoch; None if Kafka does not return it.
            key_may_be_forgotten: the record is so old that its key may be forgotten if the group has handled it.
        """
        finding = Finding.NEW
        if (position := self._to_compare.pop(tp, None)) is not None:
            self._compared[tp] = position
            finding = compare(position, offset, leader_epoch)
        elif key_may_be_forgotten and (position := self._cut.get(tp)) is not None:
            finding = compare_again(position, offset, leader_epoch)
        epochs = self._first_offsets.setdefault(tp, [])
        while epochs and epochs[-1][0] >= offset:
            epochs.pop()
        if not epochs or epochs[-1][1] != leader_epoch:
            epochs.append((offset, leader_epoch))
        return finding

    def is_cut(self, tp: TopicPartition, beginning: int) -> bool:
        """Return whether a partition was cut whose last handled record is GONE.

        Args:
            tp: the partition.
            beginning: the offset at which it begins now. If it is above the last handled record, retention has deleted
                that.
        """
        return beginning < self._compared[tp].next_offset

    def before(self, tp: TopicPartition, next_offset: int) -> int | None:
        """Return the epoch of the record before an offset; None if it is unknown."""
        earlier = [epoch for first, epoch in self._first_offsets.get(tp, []) if first < next_offset]
        return earlier[-1] if earlier else None
