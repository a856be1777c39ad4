"""Lanes: which records may be handled now, and up to where each partition is done.

All that decides is here; it knows no clock, no thread and no server. Rules:

- a queue is a key of a partition; its records are handled in their order, never two at once;
- a record that is to be tried again holds up its own queue, until it is due;
- an assignment of a partition is a new object each time: what was taken under an old one has no say in a new one;
- a partition is done up to its first record that is not.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.received import Received


class PartitionPosition(NamedTuple):
    """Up to where a partition is done: its first offset that is not, and the id of the topic that this belongs to."""

    topic_id: str
    next_offset: int


@dataclass(slots=True, eq=False)
class _Assignment:
    """A partition, for as long as this process has it."""

    topic_partition: TopicPartition
    topic_id: str | None = None  # Of the topic that its offsets belong to; None: Kafka has not said.
    queues: dict[bytes, KeyQueue] = field(default_factory=dict)
    # Records that were added and are not done, by identity: after a cut, two of them can have one offset. In the order
    # in which they came; to each, the offset at which to go on while it is the first of them. These never decrease.
    rolled_back: dict[int, int] = field(default_factory=dict)
    end: int | None = None  # After the last that was added, or where it begins; None: nobody has been here.
    reported: int | None = None  # What was last said to be committable.
    running: int = 0  # Lanes of it that are being handled.
    open: bool = True  # Whether its records are handed out.

    @property
    def position(self) -> int | None:
        """Where to go on; None: nobody has been here, and nothing was added yet."""
        return next(iter(self.rolled_back.values()), self.end)

    def add(self, record: Received) -> None:
        """Note a record that has come.

        An offset below `end` means that the partition was cut there, by an unclean election of a leader. No earlier
        record may then let the position lie above it: another record stands there now.
        """
        start = record.offset if self.end is None else min(self.end, record.offset)
        if self.end is not None and record.offset < self.end:
            self.rolled_back = {earlier: min(at, start) for earlier, at in self.rolled_back.items()}
        self.rolled_back[id(record)] = start
        self.end = record.offset + 1

    def finish(self, record: Received) -> None:
        """Forget a record that is done. However long an earlier one takes, those behind it use no memory."""
        self.rolled_back.pop(id(record), None)


@dataclass(slots=True, eq=False)
class KeyQueue:
    """The records of one key that wait, and how often the first of them has failed."""

    assignment: _Assignment
    key: bytes
    waiting: deque[Received] = field(default_factory=deque)
    failures: int = 0
    losses: int = 0


class KeyBatch(NamedTuple):
    """Some records of one queue, in their order, to be handled.

    The first has failed `failures` times, and `losses` times in a row its connection was lost while it was handled.
    """

    queue: KeyQueue
    records: list[Received]
    failures: int
    losses: int = 0


class Outcome(NamedTuple):
    """What became of a batch: its first `done` records are done with.

    The next one failed, if `again_in` says in how many seconds to try it again; `counted`: that counts against it.
    `lost`: its connection was lost while it was handled.
    """

    done: int
    again_in: float | None = None
    counted: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class HandlingResult:
    """What became of batches that were taken together, one outcome for each.

    `rolled_back`: they were handled in one transaction, which had to be undone; `deadlock`: because of one.
    """

    outcomes: list[Outcome]
    rolled_back: bool = False
    deadlock: bool = False


class KeyQueues:
    """The records that this process holds. Not for two threads at once."""

    def __init__(self) -> None:
        self._assignments: dict[TopicPartition, _Assignment] = {}
        self._ready: deque[KeyQueue] = deque()
        self._later: list[tuple[float, int, KeyQueue]] = []
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

    def partitions(self) -> list[TopicPartition]:
        """The partitions that are assigned."""
        return list(self._assignments)

    def assign(
        self,
        partitions: Iterable[TopicPartition],
        topic_ids: Mapping[str, str] | None = None,
        start_offsets: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """These partitions are ours now.

        Args:
            partitions: the partitions.
            topic_ids: the ids of their topics, where Kafka has said them.
            start_offsets: where they go on, where the group has been before.
        """
        for tp in partitions:
            topic_id, start = (topic_ids or {}).get(tp[0]), (start_offsets or {}).get(tp)
            self._assignments[tp] = _Assignment(tp, topic_id, end=start)

    def add(self, record: Received) -> None:
        """A record has come. One of a partition that is not ours is left to its owner."""
        assignment = self._assignments.get(TopicPartition(record.topic, record.partition))
        if assignment is None or not assignment.open:
            return
        if record.dead_letter is not None:
            if record.dead_letter in self._retried:
                return
            self._retried.add(record.dead_letter)
        else:
            if assignment.end is None:
                assignment.reported = record.offset
            assignment.add(record)
        # Without a key there is no order to keep: a queue of its own, by a name that no key has within a partition.
        key = b"k" + record.key if record.key is not None else b"n%d" % record.offset
        queue = assignment.queues.get(key)
        if queue is None:
            queue = assignment.queues[key] = KeyQueue(assignment, key)
            self._ready.append(queue)
        queue.waiting.append(record)
        self._waiting += 1
        self._bytes += record.size

    def take(self, limit: int, now: float) -> list[KeyBatch]:
        """Up to `limit` records to handle now, the longest-waiting queues first; each is taken until `finish`."""
        while self._later and self._later[0][0] <= now:
            _, _, queue = heapq.heappop(self._later)
            self._ready.append(queue)
        batches: list[KeyBatch] = []
        while self._ready and limit > 0:
            queue = self._ready.popleft()
            if len(queue.waiting) <= limit:
                records = list(queue.waiting)
                queue.waiting.clear()
            else:
                records = [queue.waiting.popleft() for _ in range(limit)]
            limit -= len(records)
            self._waiting -= len(records)
            self._running += len(records)
            queue.assignment.running += 1
            batches.append(KeyBatch(queue, records, queue.failures, queue.losses))
        return batches

    def next_due(self) -> float | None:
        """When the next record is to be tried again; None: none is."""
        return self._later[0][0] if self._later else None

    def finish(self, taken: KeyBatch, outcome: Outcome, now: float) -> None:
        """A batch has been handled, as `outcome` says; what is not done goes back to the head of its queue."""
        queue, assignment = taken.queue, taken.queue.assignment
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
            queue.waiting.extendleft(reversed(rest))
            self._waiting += len(rest)
            self._retried.update(each.dead_letter for each in rest if each.dead_letter)
        queue.failures = (0 if outcome.done else queue.failures) + outcome.counted
        queue.losses = (0 if outcome.done else queue.losses) + outcome.lost
        if outcome.again_in is not None:
            self._ticket += 1
            heapq.heappush(self._later, (now + outcome.again_in, self._ticket, queue))
        elif queue.waiting:
            self._ready.append(queue)
        else:
            del assignment.queues[queue.key]

    def committable(self, partitions: Collection[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """Where to go on in these partitions (None: all), for those where this has changed since the last call."""
        changed: dict[TopicPartition, int] = {}
        for tp, assignment in self._assignments.items():
            if partitions is not None and tp not in partitions:
                continue
            if (position := assignment.position) is not None and position != assignment.reported:
                changed[tp] = assignment.reported = position
        return changed

    def positions(self) -> dict[TopicPartition, PartitionPosition]:
        """Up to where partitions are done, for those of a topic whose id is known."""
        return {
            tp: PartitionPosition(assignment.topic_id, position)
            for tp, assignment in self._assignments.items()
            if assignment.topic_id is not None and (position := assignment.position) is not None
        }

    def close(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no more records of these partitions; those that wait are dropped."""
        for assignment in self._of(partitions):
            assignment.open = False
            for queue in assignment.queues.values():
                self._waiting -= len(queue.waiting)
                self._bytes -= sum(record.size for record in queue.waiting)
                self._retried.difference_update(each.dead_letter for each in queue.waiting if each.dead_letter)
            assignment.queues.clear()
        self._ready = deque(queue for queue in self._ready if queue.assignment.open)
        self._later = [entry for entry in self._later if entry[2].assignment.open]
        heapq.heapify(self._later)

    def running(self, partitions: Iterable[TopicPartition]) -> bool:
        """Whether records of these partitions are being handled."""
        return any(assignment.running for assignment in self._of(partitions))

    def revoke(self, partitions: Iterable[TopicPartition]) -> None:
        """These partitions are ours no more."""
        partitions = list(partitions)
        self.close(partitions)
        for tp in partitions:
            self._assignments.pop(tp, None)

    def _of(self, partitions: Iterable[TopicPartition]) -> list[_Assignment]:
        return [self._assignments[tp] for tp in partitions if tp in self._assignments]
