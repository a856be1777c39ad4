"""Lanes: which records may be handled now, and up to where each partition is done.

All that decides is here; it knows no clock, no thread and no server. Rules:

- a lane is a key of a partition; its records are handled in their order, never two at once;
- a record that is to be tried again holds up its own lane, until it is due;
- an assignment of a partition is a new object each time: what was taken under an old one has no say in a new one;
- a partition is done up to its first record that is not.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox_plugin.inbox.received import Place, Received

MOST_TOGETHER = 500
AIM_SECONDS = 0.1
ALONE_SECONDS = 60.0  # A deadlock costs a second (deadlock_timeout); so often at most one is risked.


class Position(NamedTuple):
    """Up to where a partition is done: its first offset that is not, and the id of the topic that this belongs to."""

    topic_id: str
    next_offset: int


@dataclass(slots=True, eq=False)
class _Assignment:
    """A partition, for as long as this process has it."""

    place: Place
    topic_id: str | None = None  # Of the topic that its offsets belong to; None: Kafka has not said.
    lanes: dict[bytes, Lane] = field(default_factory=dict)
    # Records that were added and are not done, by identity: after a cut, two of them can have one offset. In the order
    # in which they came; to each, the offset at which to go on while it is the first of them. These never decrease.
    undone: dict[int, int] = field(default_factory=dict)
    end: int | None = None  # After the last that was added, or where it begins; None: nobody has been here.
    told: int | None = None  # What was last said to be committable.
    running: int = 0  # Lanes of it that are being handled.
    open: bool = True  # Whether its records are handed out.

    @property
    def position(self) -> int | None:
        """Where to go on; None: nobody has been here, and nothing was added yet."""
        return next(iter(self.undone.values()), self.end)

    def add(self, record: Received) -> None:
        """Note a record that has come.

        An offset below `end` means that the partition was cut there, by an unclean election of a leader. No earlier
        record may then let the position lie above it: another record stands there now.
        """
        start = record.offset if self.end is None else min(self.end, record.offset)
        if self.end is not None and record.offset < self.end:
            self.undone = {earlier: min(at, start) for earlier, at in self.undone.items()}
        self.undone[id(record)] = start
        self.end = record.offset + 1

    def finish(self, record: Received) -> None:
        """Forget a record that is done. However long an earlier one takes, those behind it use no memory."""
        self.undone.pop(id(record), None)


@dataclass(slots=True, eq=False)
class Lane:
    """The records of one key that wait, and how often the first of them has failed."""

    assignment: _Assignment
    key: bytes
    waiting: deque[Received] = field(default_factory=deque)
    failures: int = 0
    losses: int = 0


class Slice(NamedTuple):
    """Some records of one lane, in their order, to be handled.

    The first has failed `failures` times, and `losses` times in a row its connection was lost while it was handled.
    """

    lane: Lane
    records: list[Received]
    failures: int
    losses: int = 0


class Outcome(NamedTuple):
    """What became of a slice: its first `done` records are done with.

    The next one failed, if `again_in` says in how many seconds to try it again; `counted`: that counts against it.
    `lost`: its connection was lost while it was handled.
    """

    done: int
    again_in: float | None = None
    counted: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Handled:
    """What became of slices that were taken together, one outcome for each.

    `undone`: they were handled in one transaction, which had to be undone; `deadlock`: because of one.
    """

    outcomes: list[Outcome]
    undone: bool = False
    deadlock: bool = False


class Lanes:
    """The records that this process holds. Not for two threads at once."""

    def __init__(self) -> None:
        self._assignments: dict[Place, _Assignment] = {}
        self._ready: deque[Lane] = deque()
        self._later: list[tuple[float, int, Lane]] = []
        self._ticket = 0
        self._retried: set[int] = set()
        self._waiting = 0
        self._running = 0
        self._bytes = 0

    @property
    def held(self) -> int:
        """How many records are held, waiting or being handled."""
        return self._waiting + self._running

    @property
    def held_bytes(self) -> int:
        """How many bytes of keys, values and headers these have."""
        return self._bytes

    @property
    def waiting(self) -> int:
        """How many records wait to be handled."""
        return self._waiting

    def places(self) -> list[Place]:
        """The partitions that are assigned."""
        return list(self._assignments)

    def assign(
        self,
        places: Iterable[Place],
        topic_ids: Mapping[str, str] | None = None,
        starts: Mapping[Place, int] | None = None,
    ) -> None:
        """These partitions are ours now.

        Args:
            places: the partitions.
            topic_ids: the ids of their topics, where Kafka has said them.
            starts: where they go on, where the group has been before.
        """
        for place in places:
            topic_id, start = (topic_ids or {}).get(place[0]), (starts or {}).get(place)
            self._assignments[place] = _Assignment(place, topic_id, end=start)

    def add(self, record: Received) -> None:
        """A record has come. One of a partition that is not ours is left to its owner."""
        assignment = self._assignments.get((record.topic, record.partition))
        if assignment is None or not assignment.open:
            return
        if record.dead_letter is not None:
            if record.dead_letter in self._retried:
                return
            self._retried.add(record.dead_letter)
        else:
            if assignment.end is None:
                assignment.told = record.offset
            assignment.add(record)
        # Without a key there is no order to keep: a lane of its own, by a name that no key has within a partition.
        key = b"k" + record.key if record.key is not None else b"n%d" % record.offset
        lane = assignment.lanes.get(key)
        if lane is None:
            lane = assignment.lanes[key] = Lane(assignment, key)
            self._ready.append(lane)
        lane.waiting.append(record)
        self._waiting += 1
        self._bytes += record.size

    def take(self, limit: int, now: float) -> list[Slice]:
        """Up to `limit` records to handle now, the longest-waiting lanes first; each is taken until `finish`."""
        while self._later and self._later[0][0] <= now:
            _, _, lane = heapq.heappop(self._later)
            self._ready.append(lane)
        slices: list[Slice] = []
        while self._ready and limit > 0:
            lane = self._ready.popleft()
            if len(lane.waiting) <= limit:
                records = list(lane.waiting)
                lane.waiting.clear()
            else:
                records = [lane.waiting.popleft() for _ in range(limit)]
            limit -= len(records)
            self._waiting -= len(records)
            self._running += len(records)
            lane.assignment.running += 1
            slices.append(Slice(lane, records, lane.failures, lane.losses))
        return slices

    def next_due(self) -> float | None:
        """When the next record is to be tried again; None: none is."""
        return self._later[0][0] if self._later else None

    def finish(self, taken: Slice, outcome: Outcome, now: float) -> None:
        """A slice has been handled, as `outcome` says; what is not done goes back to the head of its lane."""
        lane, assignment = taken.lane, taken.lane.assignment
        assignment.running -= 1
        self._running -= len(taken.records)
        if self._retried:
            self._retried.difference_update(each.dead_letter for each in taken.records if each.dead_letter)
        for record in taken.records[: outcome.done]:
            self._bytes -= record.size
            if record.dead_letter is None:
                assignment.finish(record)
        rest = taken.records[outcome.done :]
        if not assignment.open:
            self._bytes -= sum(record.size for record in rest)
            return
        if rest:
            lane.waiting.extendleft(reversed(rest))
            self._waiting += len(rest)
            self._retried.update(each.dead_letter for each in rest if each.dead_letter)
        lane.failures = (0 if outcome.done else lane.failures) + outcome.counted
        lane.losses = (0 if outcome.done else lane.losses) + outcome.lost
        if outcome.again_in is not None:
            self._ticket += 1
            heapq.heappush(self._later, (now + outcome.again_in, self._ticket, lane))
        elif lane.waiting:
            self._ready.append(lane)
        else:
            del assignment.lanes[lane.key]

    def committable(self, places: Collection[Place] | None = None) -> dict[Place, int]:
        """Where each of `places` would go on (None: all), for those where this has changed since it was last asked."""
        changed: dict[Place, int] = {}
        for place, assignment in self._assignments.items():
            if places is not None and place not in places:
                continue
            if (position := assignment.position) is not None and position != assignment.told:
                changed[place] = assignment.told = position
        return changed

    def positions(self) -> dict[Place, Position]:
        """Up to where partitions are done, for those of a topic whose id is known."""
        return {
            place: Position(assignment.topic_id, position)
            for place, assignment in self._assignments.items()
            if assignment.topic_id is not None and (position := assignment.position) is not None
        }

    def close(self, places: Iterable[Place]) -> None:
        """Hand out no more records of these partitions; those that wait are dropped."""
        for assignment in self._of(places):
            assignment.open = False
            for lane in assignment.lanes.values():
                self._waiting -= len(lane.waiting)
                self._bytes -= sum(record.size for record in lane.waiting)
                self._retried.difference_update(each.dead_letter for each in lane.waiting if each.dead_letter)
            assignment.lanes.clear()
        self._ready = deque(lane for lane in self._ready if lane.assignment.open)
        self._later = [entry for entry in self._later if entry[2].assignment.open]
        heapq.heapify(self._later)

    def running(self, places: Iterable[Place]) -> bool:
        """Whether records of these partitions are being handled."""
        return any(assignment.running for assignment in self._of(places))

    def revoke(self, places: Iterable[Place]) -> None:
        """These partitions are ours no more."""
        places = list(places)
        self.close(places)
        for place in places:
            self._assignments.pop(place, None)

    def _of(self, places: Iterable[Place]) -> list[_Assignment]:
        return [self._assignments[place] for place in places if place in self._assignments]


class Together:
    """How many records to handle in one transaction: as many as take about `AIM_SECONDS`.

    So a slow handler has its records handled one by one, on as many connections as there are, and a fast one shares the
    bookkeeping of a transaction among hundreds.

    A transaction of many events locks many rows, in the order of its events. Two of them can deadlock over rows that
    events share, where none could one by one. So for a while after a deadlock, at most one of them runs at a time.
    """

    def __init__(self, at_most: int = MOST_TOGETHER, aim_seconds: float = AIM_SECONDS) -> None:
        self._at_most = at_most
        self._aim_seconds = aim_seconds
        self._most = 1
        self._running = 0
        self._alone_until = float("-inf")

    def limit(self, waiting: int, idle: int, now: float = 0.0) -> int:
        """How many to take now, if `idle` handlers are to share `waiting` records."""
        if self._running and now < self._alone_until:
            return 1
        return max(1, min(self._most, -(-waiting // max(idle, 1))))

    def begun(self, records: int) -> None:
        """So many records have been taken together."""
        self._running += records > 1

    def done(self, records: int, seconds: float, *, undone: bool, deadlock: bool = False, now: float = 0.0) -> None:
        """So many records that were `begun` took so long together.

        `undone`: one of them failed, and all had to be done again; `deadlock`: over a lock that another handler held.
        """
        self._running = max(0, self._running - (records > 1))
        if deadlock:
            self._alone_until = now + ALONE_SECONDS
        if undone:
            self._most = 1
        elif seconds > self._aim_seconds:
            self._most = max(1, int(records * self._aim_seconds / seconds))
        elif records * 2 > self._most:
            self._most = min(self._at_most, self._most * 2)
