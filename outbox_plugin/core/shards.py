"""Shards: which slice of the keys a leader harvests, and how their number changes.

The database remembers the *layout*: how many shards there are, and a number that grows with each change. A read for
another layout returns nothing. So from the instant of a change on, no leader of the old layout reads a row. The rows
that it has read before may still be in a transaction. So before a leader of the new layout reads, the shards of every
earlier layout that is not yet *settled* are fenced, and the rows that their progress records name are deleted. The
leader of shard 0 does this for all; the leaders of the other shards wait until the database says that it is done.
"""

from __future__ import annotations

from dataclasses import dataclass

SETTLING_SHARD = 0  # Every layout has this shard.


@dataclass(frozen=True, slots=True)
class Slice:
    """Shard `number` of `count`: the keys whose hash, modulo `count`, is `number`."""

    number: int
    count: int

    @property
    def name(self) -> str:
        """Names the slice in transactional ids and progress records; no two slices that overlap share one."""
        return str(self.number) if self.count == 1 else f"{self.number}-of-{self.count}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How many shards an outbox has.

    `number` grows with each change. `unsettled` has the shard counts of earlier layouts whose leaders may still run.
    """

    number: int
    shards: int
    unsettled: tuple[int, ...] = ()

    @property
    def partitions(self) -> int:
        """How many partitions the progress topic needs, for the present shards and for those of unsettled layouts."""
        return max((self.shards, *self.unsettled))

    @property
    def former(self) -> tuple[Slice, ...]:
        """Every slice of the layouts that are not settled."""
        return tuple(Slice(number, count) for count in self.unsettled for number in range(count))
