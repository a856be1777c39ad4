"""Decides which partitions an instance asks for and gives up, and counts how far it is in each. No I/O, no clock.

How partitions are spread fairly without a rebalance: everybody sees the same holders in the log, so everybody can say
how many partitions each live instance should have. That is the same number for all, and one more for those who hold the
most already, which moves least. An instance below its share claims free partitions, few at first, so that others who
start with it are heard. Where none is free it *asks*: it claims a partition that is held. That changes nothing in any
world, but the holder reads it. An instance that holds more than its share gives up what others ask for, and only that.
So a partition moves only when somebody has room for it, and all others are consumed meanwhile.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from hashlib import md5
from typing import NamedTuple

from outbox_plugin.coordination.partition_owners import Holder
from outbox_plugin.core.topic_partition import TopicPartition

MAX_UNCOMMITTED = 100_000  # Records of one claim that are handed out and not committed.


class Plan(NamedTuple):
    """What an instance is to do next: claim what is free, ask for what is not, release."""

    claim: tuple[TopicPartition, ...] = ()
    ask: TopicPartition | None = None
    release: tuple[TopicPartition, ...] = ()


def shares(held: Mapping[Holder, int], partitions: int) -> dict[Holder, int]:
    """How many of `partitions` each live instance should hold, given how many each holds now."""
    least, more = divmod(partitions, len(held))
    fullest_first = sorted(held, key=lambda holder: (-held[holder], holder))
    return {holder: least + (rank < more) for rank, holder in enumerate(fullest_first)}


def plan(
    me: Holder,
    holders: Mapping[TopicPartition, Holder | None],
    asking: Mapping[Holder, bool],
    *,
    limit: int | None = None,
    neglected: Collection[TopicPartition] = (),
    avoid: Collection[TopicPartition] = (),
) -> Plan:
    """What `me` should do, where `holders` has all partitions and `asking` all live instances.

    Args:
        me: this instance.
        holders: who holds each partition; None where it is free.
        asking: the live instances, and whether each asks for more than it has.
        limit: how many partitions this instance may hold; None for as many as there are.
        neglected: free partitions that nobody took for long, or that one who is too slow left to others: whoever has
            room takes them, whatever its share.
        avoid: partitions that this instance could not keep up with: while there are any, it asks for none.
    """
    held = Counter(dict.fromkeys({me, *asking}, 0))
    held.update(holder for holder in holders.values() if holder is not None)
    share = shares(held, len(holders))
    mine = _in_order(me, (tp for tp, holder in holders.items() if holder == me))
    most = len(holders) if limit is None else limit
    goal = min(share[me], most)
    if len(mine) > goal:
        room = sum(max(0, share[other] - held[other]) for other, asks in asking.items() if asks and other != me)
        if room:
            return Plan(release=tuple(mine[goal:][:room]))
    free = _in_order(me, (tp for tp, holder in holders.items() if holder is None))
    wanted = [tp for tp in free if tp not in avoid]
    if len(mine) < goal and wanted:
        return Plan(claim=tuple(wanted[: min(goal - len(mine), max(1, len(mine)))]))
    if len(mine) < goal and not avoid:
        return Plan(ask=_of_the_fullest(me, holders, held))
    return Plan(claim=tuple([tp for tp in free if tp in neglected][: max(0, most - len(mine))]))


def _of_the_fullest(
    me: Holder, holders: Mapping[TopicPartition, Holder | None], held: Mapping[Holder, int]
) -> TopicPartition | None:
    others = [(held[holder], tp) for tp, holder in holders.items() if holder is not None and holder != me]
    return max(others)[1] if others else None


def _in_order(me: Holder, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
    """An order of each instance's own, always the same: two that start together begin with different partitions."""
    return sorted(partitions, key=lambda tp: _rank(me.instance_id, tp))


@lru_cache(maxsize=100_000)
def _rank(instance_id: str, tp: TopicPartition) -> bytes:
    return md5(f"{instance_id}/{tp.topic}/{tp.partition}".encode(), usedforsecurity=False).digest()


class Claim:
    """How far an instance is in one partition that it holds. Offsets are those of the next record."""

    def __init__(self, offset: int) -> None:
        """Consumption begins at `offset`."""
        self.position = offset
        self._handed_out: deque[int] = deque()
        self._done: set[int] = set()
        self._promised = offset

    @property
    def offset(self) -> int:
        """The offset at which another instance must go on, so that no record is lost."""
        return self._handed_out[0] if self._handed_out else self.position

    @property
    def promised(self) -> int:
        """Only this instance may hand out the records below this offset, because the log has promised them to it."""
        return max(self._promised, self.position)

    @property
    def uncommitted(self) -> int:
        """How many records were handed out and are not known to be done."""
        return len(self._handed_out)

    def promise(self, offset: int) -> None:
        """Note that the log has promised this instance all records below `offset` (at most once)."""
        self._promised = max(self._promised, offset)

    def hand_out(self, offset: int, *, keep: bool) -> None:
        """Note that the user gets the record at `offset`. If `keep`, remember it until it is `done` (at least once)."""
        self.position = offset + 1
        if keep:
            self._handed_out.append(offset)

    def done(self, offset: int) -> None:
        """Note that the record at `offset` is done; records may be done in any order.

        `offset` moves past it once all before it are done. A record that this claim has not handed out is ignored: an
        earlier claim handed it out, perhaps from an earlier topic of that name.
        """
        if not self._handed_out or not self._handed_out[0] <= offset < self.position:
            return
        self._done.add(offset)
        while self._handed_out and self._handed_out[0] in self._done:
            self._done.remove(self._handed_out.popleft())
