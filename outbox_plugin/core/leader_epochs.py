"""Finds out whether a partition was truncated before the position at which a group goes on.

After an unclean election of a leader, or a loss of power before a flush, other records stand at offsets that the group
has handled. They have a greater leader epoch (KIP-101). librdkafka asks the broker where an epoch ended (KIP-320) only
when the leader changes while it fetches, and not for a position that is assigned. So an inbox commits the epoch of the
last handled record with the offset, fetches that record again when it starts, and compares the epochs: two logs that
have the same epoch at one offset are the same up to there.

Nor can it rely on librdkafka (2.16) for a partition that is truncated under it. That goes back to the new end, and
drops what it has fetched: also records from before the truncation that nobody has polled yet. It does not look for a
truncation at all if it hears of the new epoch while there is no leader. So where the epoch of the records rises, an
inbox fetches the last record before that again, too, and compares. It does so, too, where the partition ends before its
former end, behind records that were not read: nothing else shows them if nobody writes to the partition after the
truncation.

A partition that was truncated is read from its beginning again, because nobody knows where it was truncated. The inbox
knows the events that it has handled by their keys, but has forgotten the keys of old ones. The leader that was elected
after the truncation has a greater epoch than the position. So an old record below the position counts as handled if its
epoch is not greater.

Each position that the group has reached stays true in this way, so all are kept that say more than the others:
`GroupPosition.handled`. They are written to Postgres before the first position that lies further back.

Where the last handled record is gone, a record after it that has a smaller epoch shows the truncation. One that has a
greater epoch may also show it: no record can be fetched from an offset at which a transaction marker stands. Then the
partition counts as truncated, unless retention has deleted the last handled record. A compacted partition may be read
again needlessly.

Consumers without rebalances (`coordination.consumer`) and readers of a topic (`adapters.truncation_aware_reader`) look
for a truncation under them in the same way.

Decides only; knows no thread and no server.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from outbox_plugin.core.topic_partition import TopicPartition


class GroupPosition(NamedTuple):
    """Where a group is in a partition: what it has reached, and where it goes on.

    Attributes:
        next_offset: the first offset that is not handled.
        leader_epoch: the leader epoch of the record before it; None if it is unknown.
        handled: positions that the group has reached before, with epochs: while a partition is read again, old records
            below them count as handled.
    """

    next_offset: int
    leader_epoch: int | None = None
    handled: tuple[HandledPosition, ...] = ()

    def and_handled(self, other: GroupPosition | None) -> GroupPosition:
        """Return this position, and that the group has also reached the other one, and those before it."""
        if other is None:
            return self
        kept: list[HandledPosition] = []
        for each in sorted({*self.handled, *other.handled, *_reached(other)}, reverse=True):
            if not any(_says_all(known, each) for known in (*kept, *_reached(self))):
                kept.append(each)
        return self._replace(handled=tuple(kept))

    def has_handled(self, offset: int, leader_epoch: int | None) -> bool:
        """Return whether an old record lies below a position that the group has reached before, in the same log.

        Only for records whose keys may be forgotten: where a leader that was elected has records of its own, of an
        epoch before the position's, the keys tell them from those that were handled.
        """
        if leader_epoch is None:
            return False
        return any(offset < each.next_offset and leader_epoch <= each.leader_epoch for each in self.handled)


class HandledPosition(NamedTuple):
    """A position that a group has reached before: its offset, and the leader epoch of the record before that."""

    next_offset: int
    leader_epoch: int


def _reached(position: GroupPosition) -> list[HandledPosition]:
    if position.leader_epoch is None:
        return []
    return [HandledPosition(position.next_offset, position.leader_epoch)]


def _says_all(known: HandledPosition, other: HandledPosition) -> bool:
    return known.next_offset >= other.next_offset and known.leader_epoch >= other.leader_epoch


class Finding(Enum):
    """What a record that was fetched shows."""

    NEW = "the record follows the position"
    HANDLED = "the group has handled the record"
    TRUNCATED = "the partition was truncated before the position"
    GONE = "the last record that was handled is gone; the record follows it, and has a greater epoch"


def compare(position: GroupPosition, offset: int, leader_epoch: int | None) -> Finding:
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
        return Finding.HANDLED if leader_epoch == position.leader_epoch else Finding.TRUNCATED
    if offset < last_handled or leader_epoch < position.leader_epoch:
        return Finding.TRUNCATED
    return Finding.GONE if leader_epoch > position.leader_epoch else Finding.NEW


class LeaderEpochs:
    """The leader epochs of the records that were fetched. Only the thread that polls may use it."""

    def __init__(self) -> None:
        self._started: dict[TopicPartition, GroupPosition] = {}
        # The position with whose last record the first one that is fetched is compared.
        self._compared: dict[TopicPartition, GroupPosition] = {}
        self._to_compare: set[TopicPartition] = set()  # Those whose first record is still to come.
        self._next: dict[TopicPartition, int] = {}  # The offset after the last record that was fetched.
        # Where a truncation was suspected last: the first offset that was not fetched, and the next record's epoch.
        self._suspected: dict[TopicPartition, tuple[int, int]] = {}
        self._ends: dict[TopicPartition, int] = {}  # The greatest end of which Kafka has told.
        # Where records before an end were looked for last: the first offset that was not fetched, and the end.
        self._looked_at: dict[TopicPartition, tuple[int, int]] = {}
        # The first offset of each epoch, ascending, as Kafka's brokers keep them.
        self._first_offsets: dict[TopicPartition, list[tuple[int, int | None]]] = {}

    def start(self, tp: TopicPartition, position: GroupPosition | None) -> int | None:
        """Forget what was fetched of a partition, and return the offset to fetch from.

        Args:
            tp: the partition.
            position: where the group goes on; None for the partition's beginning, for which None is returned.
        """
        self._to_compare.discard(tp)
        self._next.pop(tp, None)
        self._suspected.pop(tp, None)
        self._ends.pop(tp, None)
        self._looked_at.pop(tp, None)
        self._first_offsets[tp] = []
        self._started[tp] = position or GroupPosition(0)
        if position is None:
            return None
        if position.leader_epoch is None or position.next_offset == 0:
            return position.next_offset
        self._first_offsets[tp] = [(position.next_offset - 1, position.leader_epoch)]
        return self._compare_with(tp, position)

    def restart(self, tp: TopicPartition, position: GroupPosition) -> None:
        """Do the same as `start`, for a partition that was truncated and is read from its beginning.

        Args:
            tp: the partition.
            position: what the group had reached.
        """
        self.start(tp, None)
        self._started[tp] = GroupPosition(0).and_handled(position)

    def fetch_again(self, tp: TopicPartition, offset: int) -> int:
        """Expect records again that were fetched and not added, and return the offset to fetch from.

        It is the last record's before them, which is compared with what was read of it. Where no such record is known,
        it is the first offset that was not read: after a truncation, other records may stand between it and these.

        Args:
            tp: the partition.
            offset: the offset of the first of these records.
        """
        if tp in self._to_compare:
            return self.compare_again(tp)
        last = GroupPosition(self._unread(tp), self.before(tp, offset))
        if last.leader_epoch is None:
            return last.next_offset
        self._next.pop(tp, None)
        return self._compare_with(tp, last)

    def compare_again(self, tp: TopicPartition) -> int:
        """Expect the record again that was compared last, and return its offset."""
        self._next.pop(tp, None)
        return self._compare_with(tp, self._compared[tp])

    def _compare_with(self, tp: TopicPartition, position: GroupPosition) -> int:
        self._compared[tp] = position
        self._to_compare.add(tp)
        return position.next_offset - 1

    def started_at(self, tp: TopicPartition) -> GroupPosition:
        """Return the position from which a partition is read, and what the group has handled besides."""
        return self._started.get(tp, GroupPosition(0))

    def goes_on(self, tp: TopicPartition, offset: int, leader_epoch: int | None) -> bool:
        """Add a record if it follows the one before it in the same epoch and is not handled. Return whether it does.

        Almost all do. Such a record shows nothing, so it needs no other check.

        Args:
            tp: the record's partition.
            offset: the record's offset.
            leader_epoch: the record's epoch; None if Kafka does not return it.
        """
        unread = self._next.get(tp)
        if unread is None or offset < unread or self.started_at(tp).handled:
            return False
        if leader_epoch is None or leader_epoch != self._first_offsets[tp][-1][1]:
            return False
        self._next[tp] = offset + 1
        return True

    def goes_back(self, tp: TopicPartition, offset: int) -> bool:
        """Return whether a record comes after another one whose offset is not smaller: the partition was truncated."""
        return tp not in self._to_compare and offset < self._next.get(tp, 0)

    def may_follow_truncation(
        self, tp: TopicPartition, offset: int, leader_epoch: int | None, beginning: Callable[[TopicPartition], int]
    ) -> bool:
        """Return whether a record must be fetched again, with the one before it, because it may follow a truncation.

        It has a greater epoch than the record that was fetched before it, or it is the first one, and does not stand
        where it was to be expected. When it comes again, it is let through.

        Args:
            tp: the record's partition.
            offset: the record's offset.
            leader_epoch: the record's epoch; None if Kafka does not return it.
            beginning: returns the offset at which a partition begins; negative if unknown.
        """
        if leader_epoch is None or tp in self._to_compare:
            return False
        if (unread := self._next.get(tp)) is not None:
            last_epoch = self._first_offsets[tp][-1][1]
            if last_epoch is None or leader_epoch <= last_epoch:
                return False
        else:
            unread = self.started_at(tp).next_offset
            if offset <= unread or offset <= beginning(tp):
                return False
        seen, self._suspected[tp] = self._suspected.get(tp), (unread, leader_epoch)
        return seen != self._suspected[tp]

    def note_end(self, tp: TopicPartition, end: int) -> None:
        """Note the end of a partition, with all records that are not committed, as Kafka told it last."""
        self._ends[tp] = max(end, self._ends.get(tp, end))

    def may_end_at_truncation(self, tp: TopicPartition, offset: int, end: int) -> bool:
        """Return whether a partition that was read to its end may be truncated there, behind records that were not.

        That is so once for each time that the end falls. It also falls where a new leader does not know yet which
        records all replicas have.

        Args:
            tp: the partition.
            offset: where it ends for readers of committed records.
            end: the end as in `note_end`.
        """
        has_fallen = end < self._ends.get(tp, end)
        self._ends[tp] = end
        return has_fallen and self._unread(tp) < offset

    def may_have_dropped(self, tp: TopicPartition, offset: int) -> bool:
        """Return whether a partition that was read to its end may have records before that that were not read.

        That is so once for each offset at which it ends, also where transaction markers stand there. So it shows also a
        truncation after which the end lies where it was, or further on; `may_end_at_truncation` does not, and costs
        less.

        Args:
            tp: the partition.
            offset: where it ends.
        """
        unread = self._unread(tp)
        seen, self._looked_at[tp] = self._looked_at.get(tp), (unread, offset)
        return unread < offset and seen != self._looked_at[tp]

    def has_lost(self, tp: TopicPartition, offset: int) -> bool:
        """Return whether a partition that was read to its end has not the record any more that was read last.

        Args:
            tp: the partition.
            offset: where it ends.
        """
        return tp in self._to_compare and self._compared[tp].next_offset <= offset

    def _unread(self, tp: TopicPartition) -> int:
        """Return the first offset that was not read, also while the record before it is awaited again."""
        if tp in self._to_compare:
            return self._compared[tp].next_offset
        return self._next.get(tp, self.started_at(tp).next_offset)

    def note_truncation(self, tp: TopicPartition, position: GroupPosition) -> None:
        """Note that a partition was truncated under us, and which position the group had reached."""
        started = self.started_at(tp)
        self._started[tp] = GroupPosition(started.next_offset).and_handled(started).and_handled(position)

    def add(
        self, tp: TopicPartition, offset: int, leader_epoch: int | None, *, key_may_be_forgotten: bool = False
    ) -> Finding:
        """Remember the epoch of a record that was fetched, unless it shows a truncation, and return what it shows.

        Args:
            tp: the record's partition.
            offset: the record's offset.
            leader_epoch: the record's epoch; None if Kafka does not return it.
            key_may_be_forgotten: the record is so old that its key may be forgotten if the group has handled it.
        """
        finding, started = Finding.NEW, self.started_at(tp)
        if tp in self._to_compare:
            self._to_compare.discard(tp)
            finding = compare(self._compared[tp], offset, leader_epoch)
        if finding is Finding.TRUNCATED:
            return finding
        if key_may_be_forgotten and started.has_handled(offset, leader_epoch):
            finding = Finding.HANDLED
        self._next[tp] = offset + 1
        epochs = self._first_offsets.setdefault(tp, [])
        while epochs and epochs[-1][0] >= offset:
            epochs.pop()
        if not epochs or epochs[-1][1] != leader_epoch:
            epochs.append((offset, leader_epoch))
        return finding

    def is_truncated(self, tp: TopicPartition, beginning: int) -> bool:
        """Return whether a partition was truncated whose last handled record is GONE.

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

    def follows_a_record(self, tp: TopicPartition, next_offset: int) -> bool:
        """Return whether the record before an offset was read: if not, nobody could notice a truncation there later."""
        epochs = self._first_offsets.get(tp)
        return not epochs or next_offset > epochs[0][0]

    def position(self, tp: TopicPartition, next_offset: int) -> GroupPosition:
        """Return an offset up to which a partition is done as a position, to be kept.

        Where no record was read before it, that is the partition's beginning.
        """
        at = next_offset if self.follows_a_record(tp, next_offset) else 0
        here = GroupPosition(at, self.before(tp, at))
        return here.and_handled(self.started_at(tp)._replace(leader_epoch=None))
