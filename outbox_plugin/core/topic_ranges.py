"""Ranges of a topic's offsets, and the position up to which a consumer has had its effects. No I/O.

A consumer's position is one offset per partition, kept in Postgres. A range goes from the position to a later
offset. One transaction makes the range's effects and moves the position from the range's begin to its end. So:

    the position stands at the range's begin        the transaction may commit: `remaining` is the whole range
    it stands within the range                      the rest is consumed: `remaining` is smaller
    it stands at the range's end, or behind it      all of it has been consumed before: `remaining` is empty
    it stands before the range's begin              refused: what lies between would never be consumed

Offsets count more than records: the marks that end Kafka's transactions take some, aborted records do, and compaction
leaves gaps. So a range of a hundred offsets may hold no record at all. It is consumed like any other, which moves the
position, and so it is not asked for again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from outbox_plugin.errors import RangeRefused, TopicReplaced

Offsets = Mapping[int, int]  # By partition.


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where a consumer has had its effects.

    `next_offsets`: of each partition, the first offset that has had none. `lost`: how many offsets Kafka had deleted
    before they were consumed.
    """

    topic_id: str
    next_offsets: Offsets
    lost: int = 0


@dataclass(frozen=True, slots=True)
class TopicState:
    """What Kafka says of a topic: its id, and of each partition the first offset that is there and the end.

    The end is the last stable offset, up to which a `read_committed` consumer sees records.
    """

    topic_id: str
    first: Offsets
    end: Offsets


@dataclass(frozen=True, slots=True)
class TopicRange:
    """What one consumer is to consume of one topic at once: of each partition, from `begin` to before `end`.

    `backfill`: empty for the consumer's own progress. Otherwise the name of a backfill, which has a position of its own
    and may consume what the consumer has consumed before.

    Raises:
        RangeRefused: its partitions or offsets make no sense.
    """

    consumer: str
    topic: str
    topic_id: str
    begin: Offsets
    end: Offsets
    backfill: str = ""

    def __post_init__(self) -> None:
        if self.begin.keys() != self.end.keys():
            raise RangeRefused(f"{self.name}: begin and end name different partitions")
        for partition, first in self.begin.items():
            if not 0 <= first <= self.end[partition]:
                raise RangeRefused(
                    f"{self.name}: partition {partition}: expected 0 <= begin <= end "
                    f"(given: {first} and {self.end[partition]})"
                )

    @property
    def name(self) -> str:
        """Who consumes what, for messages."""
        return f"{self.consumer}{f' (backfill {self.backfill})' if self.backfill else ''} of the topic {self.topic}"

    @property
    def offsets(self) -> int:
        """How many offsets it spans: at least as many as it has records."""
        return sum(self.end[partition] - first for partition, first in self.begin.items())

    def text(self) -> str:
        """The range in one line: `0:10-25, 1:7-9`."""
        spans = [(each, self.begin[each], self.end[each]) for each in sorted(self.begin)]
        return ", ".join(f"{each}:{begin}-{end}" for each, begin, end in spans if begin < end)


@dataclass(frozen=True, slots=True)
class Planned:
    """What can be consumed next.

    Attributes:
        range: the next range; None where nothing is to be consumed.
        lag: how many offsets there are to consume, this range included.
        lost: how many offsets Kafka has deleted since the position was reached, unconsumed.
        beyond: partitions whose end lies before the position, as after a broker lost records; they wait.
    """

    range: TopicRange | None
    lag: int
    lost: int = 0
    beyond: tuple[int, ...] = ()


def plan(consumer: str, topic: str, position: Position | None, state: TopicState, max_offsets: int) -> Planned:
    """The next range: from the position, over at most `max_offsets` offsets that are still there.

    A new consumer begins with the first offsets that are there. Its first range names all partitions, also those of
    which it takes nothing. So a partition that the position does not know was added later: it begins at offset 0, and
    what Kafka has deleted of it is lost.

    Args:
        consumer: the consumer's name.
        topic: the topic.
        position: the consumer's; None if it has consumed nothing yet.
        state: what Kafka has of the topic.
        max_offsets: how many offsets a range has at most.

    Raises:
        TopicReplaced: the position is that of another topic of this name, which was deleted.
    """
    if position is not None and position.topic_id != state.topic_id:
        raise TopicReplaced(consumer, topic, position.topic_id, state.topic_id)
    known = position.next_offsets if position else {}
    is_new = not known
    begin = {partition: known.get(partition, first if is_new else 0) for partition, first in state.first.items()}
    beyond = tuple(sorted(partition for partition, offset in begin.items() if offset > state.end[partition]))
    there = {
        partition: max(offset, state.first[partition]) for partition, offset in begin.items() if partition not in beyond
    }
    waiting = {partition: max(0, state.end[partition] - offset) for partition, offset in there.items()}
    lost = sum(offset - begin[partition] for partition, offset in there.items())
    taken = shared(waiting, max_offsets)
    end = {partition: offset + taken[partition] for partition, offset in there.items()}
    moved = [partition for partition in sorted(end) if end[partition] > begin[partition]]
    named = sorted(end) if is_new else moved
    found = TopicRange(
        consumer, topic, state.topic_id, {each: begin[each] for each in named}, {each: end[each] for each in named}
    )
    return Planned(found if moved else None, sum(waiting.values()), lost, beyond)


def shared(waiting: Mapping[int, int], most: int) -> dict[int, int]:
    """How many of the waiting offsets of each partition are taken, `most` in all.

    Small partitions are taken whole, and the rest is shared evenly, so that no partition waits for a large one.
    """
    taken, room = {}, most
    for number, (partition, offsets) in enumerate(sorted(waiting.items(), key=lambda each: (each[1], each[0]))):
        taken[partition] = min(offsets, room // (len(waiting) - number))
        room -= taken[partition]
    return taken


def remaining(wanted: TopicRange, position: Position | None) -> TopicRange:
    """The part of `wanted` that has not been consumed; empty where all of it has been.

    A partition of which `wanted` takes nothing stays in it where the position does not know it yet.

    Raises:
        TopicReplaced: the topic is another one than the position speaks of.
        RangeRefused: offsets between the position and the range's begin would never be consumed.
    """
    keeps_empty = not wanted.backfill
    if position is None:
        return wanted if keeps_empty else _without_empty(wanted, wanted.begin)
    if position.topic_id != wanted.topic_id:
        raise TopicReplaced(wanted.consumer, wanted.topic, position.topic_id, wanted.topic_id)
    begin = {}
    for partition, first in wanted.begin.items():
        reached = position.next_offsets.get(partition, first)
        if reached < first < wanted.end[partition]:
            raise RangeRefused(
                f"{wanted.name}: partition {partition} has been consumed up to offset {reached}, and the range begins "
                f"at {first}: what lies between would never be consumed"
            )
        begin[partition] = min(max(first, reached), wanted.end[partition])
    return _without_empty(wanted, begin, wanted.begin.keys() - position.next_offsets if keeps_empty else frozenset())


def _without_empty(wanted: TopicRange, begin: Offsets, kept: Set[int] = frozenset()) -> TopicRange:
    some = [partition for partition in begin if begin[partition] < wanted.end[partition] or partition in kept]
    return replace(wanted, begin={each: begin[each] for each in some}, end={each: wanted.end[each] for each in some})


@dataclass(frozen=True, slots=True)
class Readable:
    """The part of a range that Kafka still has, and how many offsets of the range it has deleted."""

    range: TopicRange
    lost: int = field(default=0)


def readable(wanted: TopicRange, state: TopicState) -> Readable:
    """What there is to read of `wanted`.

    Raises:
        TopicReplaced: the topic has been recreated.
        RangeRefused: it has no such partition, or ends before the range does.
    """
    if state.topic_id != wanted.topic_id:
        raise TopicReplaced(wanted.consumer, wanted.topic, wanted.topic_id, state.topic_id)
    begin = {}
    for partition, first in wanted.begin.items():
        if partition not in state.end or state.end[partition] < wanted.end[partition]:
            raise RangeRefused(
                f"{wanted.name}: partition {partition} ends at {state.end.get(partition)}, before the range does "
                f"({wanted.end[partition]}): wait, if a broker has just taken over; else the broker has lost records"
            )
        begin[partition] = min(max(first, state.first[partition]), wanted.end[partition])
    lost = sum(begin[partition] - first for partition, first in wanted.begin.items())
    return Readable(_without_empty(wanted, begin), lost)
