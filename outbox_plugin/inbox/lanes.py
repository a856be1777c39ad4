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
from collections.abc import Iterable
from dataclasses import dataclass, field

from outbox_plugin.inbox.received import Place, Received

MOST_TOGETHER = 500
AIM_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Assignment:
    """A partition, for as long as this process has it."""

    place: Place
    lanes: dict[bytes, Lane] = field(default_factory=dict)
    pending: deque[int] = field(default_factory=deque)  # Offsets that were added, from the first that is not done.
    done: set[int] = field(default_factory=set)  # Offsets among them that are.
    position: int | None = None  # Where to go on; None: nothing was added yet.
    told: int | None = None  # What was last said to be committable.
    running: int = 0  # Lanes of it that are being handled.
    open: bool = True  # Whether its records are handed out.

    def finish(self, offset: int) -> None:
        self.done.add(offset)
        while self.pending and self.pending[0] in self.done:
            last = self.pending.popleft()
            self.done.discard(last)
            self.position = last + 1


@dataclass(slots=True, eq=False)
class Lane:
    """The records of one key that wait, and how often the first of them has failed."""

    assignment: _Assignment
    key: bytes
    waiting: deque[Received] = field(default_factory=deque)
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """Some records of one lane, in their order, to be handled; the first has failed `failures` times."""

    lane: Lane
    records: list[Received]
    failures: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a slice: its first `done` records are done with.

    The next one failed, if `again_in` says in how many seconds to try it again; `counted`: that counts against it.
    """

    done: int
    again_in: float | None = None
    counted: bool = False


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

    @property
    def held(self) -> int:
        """How many records are held, waiting or being handled."""
        return self._waiting + self._running

    @property
    def waiting(self) -> int:
        """How many records wait to be handled."""
        return self._waiting

    def places(self) -> list[Place]:
        """The partitions that are assigned."""
        return list(self._assignments)

    def assign(self, places: Iterable[Place]) -> None:
        """These partitions are ours now."""
        for place in places:
            self._assignments[place] = _Assignment(place)

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
            if assignment.position is None:
                assignment.position = assignment.told = record.offset
            assignment.pending.append(record.offset)
        # Without a key there is no order to keep: a lane of its own, by a name that no key has within a partition.
        key = b"k" + record.key if record.key is not None else b"n%d" % record.offset
        lane = assignment.lanes.get(key)
        if lane is None:
            lane = assignment.lanes[key] = Lane(assignment, key)
            self._ready.append(lane)
        lane.waiting.append(record)
        self._waiting += 1

    def take(self, limit: int, now: float) -> list[Slice]:
        """Up to `limit` records to handle now, the longest-waiting lanes first; each is taken until `finish`."""
        while self._later and self._later[0][0] <= now:
            _, _, lane = heapq.heappop(self._later)
            self._ready.append(lane)
        slices: list[Slice] = []
        while self._ready and limit > 0:
            lane = self._ready.popleft()
            records = [lane.waiting.popleft() for _ in range(min(limit, len(lane.waiting)))]
            limit -= len(records)
            self._waiting -= len(records)
            self._running += len(records)
            lane.assignment.running += 1
            slices.append(Slice(lane, records, lane.failures))
        return slices

    def next_due(self) -> float | None:
        """When the next record is to be tried again; None: none is."""
        return self._later[0][0] if self._later else None

    def finish(self, taken: Slice, outcome: Outcome, now: float) -> None:
        """A slice has been handled, as `outcome` says; what is not done goes back to the head of its lane."""
        lane, assignment = taken.lane, taken.lane.assignment
        assignment.running -= 1
        self._running -= len(taken.records)
        self._retried.difference_update(each.dead_letter for each in taken.records if each.dead_letter)
        for record in taken.records[: outcome.done]:
            if record.dead_letter is None:
                assignment.finish(record.offset)
        if not assignment.open:
            return
        rest = taken.records[outcome.done :]
        lane.waiting.extendleft(reversed(rest))
        self._waiting += len(rest)
        self._retried.update(each.dead_letter for each in rest if each.dead_letter)
        lane.failures = (0 if outcome.done else lane.failures) + outcome.counted
        if outcome.again_in is not None:
            self._ticket += 1
            heapq.heappush(self._later, (now + outcome.again_in, self._ticket, lane))
        elif lane.waiting:
            self._ready.append(lane)
        else:
            del assignment.lanes[lane.key]

    def committable(self) -> dict[Place, int]:
        """Where each partition would go on, for those where this has changed since it was last asked."""
        changed: dict[Place, int] = {}
        for place, assignment in self._assignments.items():
            if assignment.position is not None and assignment.position != assignment.told:
                changed[place] = assignment.told = assignment.position
        return changed

    def close(self, places: Iterable[Place]) -> None:
        """Hand out no more records of these partitions; those that wait are dropped."""
        for assignment in self._of(places):
            assignment.open = False
            for lane in assignment.lanes.values():
                self._waiting -= len(lane.waiting)
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
    """

    def __init__(self) -> None:
        self._most = 1

    def limit(self, waiting: int, idle: int) -> int:
        """How many to take now, if `idle` handlers are to share `waiting` records."""
        return max(1, min(self._most, -(-waiting // max(idle, 1))))

    def done(self, records: int, seconds: float, *, undone: bool) -> None:
        """So many records took so long together; `undone`: one of them failed, and all had to be done again."""
        if undone:
            self._most = 1
        elif seconds > AIM_SECONDS:
            self._most = max(1, int(records * AIM_SECONDS / seconds))
        elif records * 2 > self._most:
            self._most = min(MOST_TOGETHER, self._most * 2)
