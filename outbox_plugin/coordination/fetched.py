"""Records that were fetched and not yet handed out: each stays with its claim until the user has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from outbox_plugin.coordination.claims import Claim
from outbox_plugin.core.topic_partition import TopicPartition

Record = TypeVar("Record")


class Answer(Enum):
    """Whether a record may go to the user."""

    YES = "yes"
    NOT_YET = "not yet"  # The claim may still be ours: the log has to say so.
    NEVER = "never"  # The claim is not ours any more.
    OLD = "old"  # It was handed out before.


class Fetched(Generic[Record]):
    """Queues of records, one for each claim. A record leaves its queue when it is handed out or the claim ends."""

    def __init__(self) -> None:
        """Nothing is fetched yet."""
        self._queues: dict[TopicPartition, tuple[Claim, deque[tuple[int, Record]]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tp: TopicPartition, claim: Claim, offset: int, record: Record) -> None:
        """Add a record of a partition. Records of an earlier claim on the partition are dropped."""
        known = self._queues.get(tp)
        if known is None or known[0] is not claim:
            self.forget(tp)
            known = self._queues[tp] = (claim, deque())
        known[1].append((offset, record))
        self._count += 1

    def forget(self, tp: TopicPartition) -> None:
        """Drop the partition's queue: its claim has ended."""
        _, queue = self._queues.pop(tp, (None, ()))
        self._count -= len(queue)

    def ends(self) -> dict[TopicPartition, tuple[Claim, int]]:
        """The offset after the last record of each claim."""
        return {tp: (claim, queue[-1][0] + 1) for tp, (claim, queue) in self._queues.items()}

    def next(self, may: Callable[[TopicPartition, Claim, int], Answer]) -> Record | None:
        """Return the next record that `may` allows to be handed out; None if there is none now."""
        ended = []
        found = None
        for tp, (claim, queue) in self._queues.items():
            answer = may(tp, claim, queue[0][0])
            while answer is Answer.OLD and len(queue) > 1:
                queue.popleft()
                self._count -= 1
                answer = may(tp, claim, queue[0][0])
            if answer is Answer.YES:
                found = queue.popleft()[1]
                self._count -= 1
            if answer in (Answer.NEVER, Answer.OLD) or not queue:
                ended.append(tp)
            if found is not None:
                break
        for tp in ended:
            self.forget(tp)
        return found
