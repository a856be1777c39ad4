"""Key queues: which records may be handled now, and up to where each partition is done.

Decides only; knows no clock, no thread and no server. Rules:

- each key of a partition has a queue; its records are handled in their order, never two at once;
- a record that will be tried again delays only its own queue, until it is due;
- partitions take turns, and within a partition, its queues: what waits of others delays a record by one turn of each;
- each assignment of a partition is a new object; records that were taken under an old one do not change a new one;
- a partition is done up to its first record that is not done.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from outbox_plugin.core.memory_limit import Load
from outbox_plugin.core.topic_partition import TopicPartition, topic_partition
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Failures, Fault


class OffsetInTopic(NamedTuple):
    """Up to where a partition is done.

    Attributes:
        topic_id: the topic's id; the offset means nothing in a topic that was recreated.
        next_offset: the first offset that is not done.
    """

    topic_id: str
    next_offset: int


@dataclass(slots=True, eq=False)
class _Assignment:
    """A partition, from when this process gets it until it is revoked."""

    topic_partition: TopicPartition
    topic_id: str | None = None  # None: Kafka has not returned it.
    queues: dict[bytes, KeyQueue] = field(default_factory=dict)
    ready: deque[KeyQueue] = field(default_factory=deque)  # Those whose first record may be handled now.
    # The records that are not done, in the order in which they came: id(record) -> the partition's position while that
    # record is the first of them. The positions never decrease. Keyed by identity, because after a truncation two
    # records can have the same offset.
    resume_offsets: dict[int, int] = field(default_factory=dict)
    # The offset after the last added record, or the start. None: the group has not been here, or begins again.
    end: int | None = None
    reported: int | None = None  # The position that `committable` returned last.
    running: set[bytes] = field(default_factory=set)  # The keys whose records are being handled.
    held: int = 0  # Records that wait or are being handled; not kept up to date once it is closed.
    held_bytes: int = 0
    open: bool = True  # Whether `take` returns its records.

    @property
    def position(self) -> int | None:
        """The first offset that is not done; None if no record was added yet where the group has not been.

        Also None after a restart, until a record comes.
        """
        return None if self.end is None else next(iter(self.resume_offsets.values()), self.end)

    def add(self, record: Received) -> None:
        """Add a record that is not done."""
        self.resume_offsets[id(record)] = self._reach(record.offset)

    def leave_out(self, record: Received) -> None:
        """Pass over a record that was handled before."""
        self._reach(record.offset)

    def _reach(self, offset: int) -> int:
        """Note that a record has come, and return the position before it.

        An offset below `end` means that an unclean election of a leader has truncated the partition there. Other
        records stand at the offsets from there on, so no earlier record may keep the position above it. The same holds
        for records from before a restart.
        """
        start = self.end
        if start is None:
            self.reported = offset
        if start is None or offset < start:
            start = offset
            self.resume_offsets = {earlier: min(at, start) for earlier, at in self.resume_offsets.items()}
        self.end = offset + 1
        return start

    def restart(self, topic_id: str | None) -> None:
        """Expect the records from the partition's beginning on."""
        self.topic_id = topic_id
        self.end = self.reported = None

    def finish(self, record: Received) -> None:
        """Forget a record that is done, so that an earlier one that takes an hour costs no memory for later ones."""
        self.resume_offsets.pop(id(record), None)


@dataclass(slots=True, eq=False)
class KeyQueue:
    """The waiting records of one key.

    Attributes:
        failures: how often the first record has failed.
    """

    assignment: _Assignment
    key: bytes
    waiting: deque[Received] = field(default_factory=deque)
    failures: Failures = field(default_factory=Failures)


class KeyBatch(NamedTuple):
    """Records of one key that a worker has taken, in their order.

    Attributes:
        queue: where they come from.
        records: the records.
        failures: how often the first record has failed.
    """

    queue: KeyQueue
    records: list[Received]
    failures: Failures


class Outcome(NamedTuple):
    """What became of a key batch.

    Attributes:
        done: how many of its first records are done.
        again_in: in how many seconds to try the next record again; None if all are done.
        fault: whose fault it is that the next record has failed.
    """

    done: int
    again_in: float | None = None
    fault: Fault = Fault.NOBODY


@dataclass(frozen=True, slots=True)
class HandlingResult:
    """What became of key batches that were taken together.

    Attributes:
        outcomes: one for each key batch.
        rolled_back: they were handled in one transaction, which was rolled back.
        deadlock: it was rolled back because of a deadlock.
    """

    outcomes: list[Outcome]
    rolled_back: bool = False
    deadlock: bool = False


class KeyQueues:
    """The records that this process holds. Not safe for threads: `Dispatcher` locks it."""

    def __init__(self) -> None:
        self._assignments: dict[TopicPartition, _Assignment] = {}
        self._turns: deque[_Assignment] = deque()  # The partitions that have such queues, in the order of their turns.
        self._later: list[tuple[float, int, KeyQueue]] = []
        self._ticket = 0
        # The keys of which a handler still has records from before the partition was given up. Later records wait.
        self._blocked: set[tuple[TopicPartition, bytes]] = set()
        self._retried: set[int] = set()
        self._waiting = 0
        self._running = 0
        self._bytes = 0

    @property
    def held(self) -> int:
        """The number of records that wait or are being handled."""
        return self._waiting + self._running

    @property
    def held_bytes(self) -> int:
        """About how many bytes of memory they take."""
        return self._bytes

    def load(self) -> Load:
        """Return what is held."""
        return Load(self.held, self._bytes)

    def loads(self) -> dict[TopicPartition, Load]:
        """Return what is held of each partition that is assigned."""
        return {tp: Load(assignment.held, assignment.held_bytes) for tp, assignment in self._assignments.items()}

    @property
    def waiting(self) -> int:
        """The number of records that wait."""
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
        """Take over partitions.

        Args:
            partitions: the partitions.
            topic_ids: the ids of their topics, as far as Kafka has returned them.
            start_offsets: the first offset that is not done, of partitions where the group has been before.
        """
        for tp in partitions:
            topic_id, start = (topic_ids or {}).get(tp.topic), (start_offsets or {}).get(tp)
            self._assignments[tp] = _Assignment(tp, topic_id, end=start)

    def restart(self, tp: TopicPartition, topic_id: str | None) -> None:
        """Expect a partition's records from its beginning on: it was truncated, or its topic was recreated.

        The records that wait or are being handled stay in their queues, before those that come, so that no record
        overtakes an earlier one of its key. Those that come again are known by their idempotency keys.

        Args:
            tp: the partition, which is assigned.
            topic_id: the topic's id, as far as Kafka has returned it.
        """
        self._assignments[tp].restart(topic_id)

    def add(self, record: Received) -> None:
        """Queue a record. A record of a partition that is not assigned is left to its owner."""
        assignment = self._assignments.get(topic_partition(record.topic, record.partition))
        if assignment is None or not assignment.open:
            return
        if record.dead_letter is not None:
            if record.dead_letter in self._retried:
                return
            self._retried.add(record.dead_letter)
        else:
            assignment.add(record)
        # A record without a key has no order to keep: it gets a queue of its own, whose name no key can have.
        key = b"k" + record.key if record.key is not None else b"n%d" % record.offset
        queue = assignment.queues.get(key)
        if queue is None:
            queue = assignment.queues[key] = KeyQueue(assignment, key)
            if (assignment.topic_partition, key) not in self._blocked:
                self._make_ready(queue)
        queue.waiting.append(record)
        self._waiting += 1
        self._bytes += record.size
        assignment.held += 1
        assignment.held_bytes += record.size

    def leave_out(self, record: Received) -> None:
        """Pass over a record that was handled before, as its place in the partition shows: its position moves on."""
        assignment = self._assignments.get(TopicPartition(record.topic, record.partition))
        if assignment is not None and assignment.open:
            assignment.leave_out(record)

    def take(self, limit: int, now: float) -> list[KeyBatch]:
        """Take records to handle now: of one queue of each partition in turn, the longest-waiting queues first.

        A queue is taken until `finish`.

        Args:
            limit: the highest number of records.
            now: monotonic seconds.
        """
        while self._later and self._later[0][0] <= now:
            _, _, queue = heapq.heappop(self._later)
            self._make_ready(queue)
        batches: list[KeyBatch] = []
        while self._turns and limit > 0:
            assignment = self._turns.popleft()
            queue = assignment.ready.popleft()
            if assignment.ready:
                self._turns.append(assignment)
            if len(queue.waiting) <= limit:
                records = list(queue.waiting)
                queue.waiting.clear()
            else:
                records = [queue.waiting.popleft() for _ in range(limit)]
            limit -= len(records)
            self._waiting -= len(records)
            self._running += len(records)
            assignment.running.add(queue.key)
            batches.append(KeyBatch(queue, records, queue.failures))
        return batches

    def _make_ready(self, queue: KeyQueue) -> None:
        assignment = queue.assignment
        if not assignment.ready:
            self._turns.append(assignment)
        assignment.ready.append(queue)

    def _unblock(self, tp: TopicPartition, key: bytes) -> None:
        """Let a key's records be taken: no handler has one any more from before the partition was given up."""
        if (tp, key) not in self._blocked:
            return
        self._blocked.remove((tp, key))
        if tp in self._assignments and (queue := self._assignments[tp].queues.get(key)) is not None:
            self._make_ready(queue)

    def next_due(self) -> float | None:
        """Return the time at which the next record is tried again; None if none waits for that."""
        return self._later[0][0] if self._later else None

    def finish(self, taken: KeyBatch, outcome: Outcome, now: float) -> None:
        """Give back a key batch. Records that are not done return to the head of their queue.

        Args:
            taken: the key batch, as `take` returned it.
            outcome: what became of it.
            now: monotonic seconds.
        """
        queue, assignment = taken.queue, taken.queue.assignment
        assignment.running.discard(queue.key)
        self._running -= len(taken.records)
        if self._retried:
            self._retried.difference_update(each.dead_letter for each in taken.records if each.dead_letter)
        for record in taken.records[: outcome.done]:
            self._bytes -= record.size
            assignment.held -= 1
            assignment.held_bytes -= record.size
            if record.dead_letter is None:
                assignment.finish(record)
        rest = taken.records[outcome.done :]
        if not assignment.open:
            self._bytes -= sum(record.size for record in rest)
            self._unblock(assignment.topic_partition, queue.key)
            return
        if rest:
            queue.waiting.extendleft(reversed(rest))
            self._waiting += len(rest)
            self._retried.update(each.dead_letter for each in rest if each.dead_letter)
        queue.failures = (Failures() if outcome.done else queue.failures).plus(outcome.fault)
        if outcome.again_in is not None:
            self._ticket += 1
            heapq.heappush(self._later, (now + outcome.again_in, self._ticket, queue))
        elif queue.waiting:
            self._make_ready(queue)
        else:
            del assignment.queues[queue.key]

    def committable(self, partitions: Collection[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        """Return the position of these partitions (None: all) where it has changed since the last call."""
        changed: dict[TopicPartition, int] = {}
        for tp, assignment in self._assignments.items():
            if partitions is not None and tp not in partitions:
                continue
            if (position := assignment.position) is not None and position != assignment.reported:
                changed[tp] = assignment.reported = position
        return changed

    def positions(self) -> dict[TopicPartition, OffsetInTopic]:
        """Return the positions of all partitions of topics whose id is known, where the group has been."""
        return {
            tp: OffsetInTopic(assignment.topic_id, position)
            for tp, assignment in self._assignments.items()
            if assignment.topic_id is not None and (position := assignment.position) is not None
        }

    def next_offsets(self) -> dict[TopicPartition, int | None]:
        """Return the first offset that is not done of each partition; None if the group has not been there."""
        return {tp: assignment.position for tp, assignment in self._assignments.items()}

    def close(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the waiting records of these partitions, and take no more of them."""
        for assignment in self._of(partitions):
            assignment.open = False
            for queue in assignment.queues.values():
                self._waiting -= len(queue.waiting)
                self._bytes -= sum(record.size for record in queue.waiting)
                self._retried.difference_update(each.dead_letter for each in queue.waiting if each.dead_letter)
            assignment.queues.clear()
            assignment.ready.clear()
        self._turns = deque(assignment for assignment in self._turns if assignment.open)
        self._later = [entry for entry in self._later if entry[2].assignment.open]
        heapq.heapify(self._later)

    def busy(self) -> dict[TopicPartition, Callable[[], bool]]:
        """Return the partitions whose records are being handled, each with a function that says whether they still are.

        Those functions go on to answer after the partitions have been revoked.
        """
        return {tp: partial(_is_running, each) for tp, each in self._assignments.items() if each.running}

    def running(self, partitions: Iterable[TopicPartition]) -> bool:
        """Return whether records of these partitions are being handled."""
        return any(assignment.running for assignment in self._of(partitions))

    def revoke(self, partitions: Iterable[TopicPartition]) -> None:
        """Give up partitions.

        If one is assigned again while a handler still has records of it, later records of their keys wait for that.
        """
        partitions = list(partitions)
        self.close(partitions)
        for tp in partitions:
            if (assignment := self._assignments.pop(tp, None)) is not None:
                self._blocked.update((tp, key) for key in assignment.running)

    def _of(self, partitions: Iterable[TopicPartition]) -> list[_Assignment]:
        return [self._assignments[tp] for tp in partitions if tp in self._assignments]


def _is_running(assignment: _Assignment) -> bool:
    return bool(assignment.running)
