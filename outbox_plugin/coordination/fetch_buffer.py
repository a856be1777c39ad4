"""Buffers records that were fetched and not yet handed out: each stays with its claim until the user has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from outbox_plugin.coordination.claims import Claim
from outbox_plugin.core.memory_limit import Load
from outbox_plugin.core.topic_partition import TopicPartition

Record = TypeVar("Record")


class MayHandOut(Enum):
    """Whether a record may go to the user."""

    YES = "yes"
    NOT_YET = "not yet"  # The claim may still be ours: the log has to say so.
    NEVER = "never"  # The claim is not ours any more.
    OLD = "old"  # It was handed out before.


class _Queue(Generic[Record]):
    """The fetched records of one claim, each with its offset and its size."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.records: deque[tuple[int, Record, int]] = deque()
        self.size = 0


class FetchBuffer(Generic[Record]):
    """Queues of records, one for each claim. A record leaves its queue when it is handed out or the claim ends."""

    def __init__(self) -> None:
        """Nothing is fetched yet."""
        self._queues: dict[TopicPartition, _Queue[Record]] = {}
        self._count = 0
        self._size = 0

    def __len__(self) -> int:
        return self._count

    def load(self) -> Load:
        """What is held of all partitions."""
        return Load(self._count, self._size)

    def loads(self) -> dict[TopicPartition, Load]:
        """What is held of each partition that has a queue."""
        return {tp: Load(len(queue.records), queue.size) for tp, queue in self._queues.items()}

    def add(self, tp: TopicPartition, claim: Claim, offset: int, record: Record, size: int = 0) -> None:
        """Add a record of a partition. Records of an earlier claim on the partition are dropped.

        Args:
            tp: the partition.
            claim: the claim by which it was fetched.
            offset: the record's offset.
            record: the record.
            size: how many bytes of memory it takes.
        """
        queue = self._queues.get(tp)
        if queue is None or queue.claim is not claim:
            self.forget(tp)
            queue = self._queues[tp] = _Queue(claim)
        queue.records.append((offset, record, size))
        queue.size += size
        self._count += 1
        self._size += size

    def forget(self, tp: TopicPartition) -> None:
        """Drop the partition's queue: its claim has ended."""
        if (queue := self._queues.pop(tp, None)) is not None:
            self._count -= len(queue.records)
            self._size -= queue.size

    def truncate(self, tp: TopicPartition, offset: int) -> None:
        """Drop the partition's records from an offset on: Kafka has others there."""
        queue = self._queues.get(tp)
        while queue is not None and queue.records and queue.records[-1][0] >= offset:
            _, _, size = queue.records.pop()
            queue.size -= size
            self._count -= 1
            self._size -= size
        if queue is not None and not queue.records:
            self.forget(tp)

    def end(self, tp: TopicPartition) -> int:
        """The offset after the last record of a partition; 0 if there is none."""
        queue = self._queues.get(tp)
        return 0 if queue is None else queue.records[-1][0] + 1

    def ends(self) -> dict[TopicPartition, tuple[Claim, int]]:
        """The offset after the last record of each claim."""
        return {tp: (queue.claim, queue.records[-1][0] + 1) for tp, queue in self._queues.items()}

    def next(self, may: Callable[[TopicPartition, Claim, int], MayHandOut]) -> Record | None:
        """Return the next record that `may` allows to be handed out; None if there is none now."""
        ended = []
        found = None
        for tp, queue in self._queues.items():
            answer = may(tp, queue.claim, queue.records[0][0])
            while answer is MayHandOut.OLD and len(queue.records) > 1:
                self._take(queue)
                answer = may(tp, queue.claim, queue.records[0][0])
            if answer is MayHandOut.YES:
                found = self._take(queue)
            if answer in (MayHandOut.NEVER, MayHandOut.OLD) or not queue.records:
                ended.append(tp)
            if found is not None:
                break
        for tp in ended:
            self.forget(tp)
        return found

    def _take(self, queue: _Queue[Record]) -> Record:
        _, record, size = queue.records.popleft()
        queue.size -= size
        self._count -= 1
        self._size -= size
        return record
