"""What an instance holds, with its lease; and what it has said and the log has not answered."""

from __future__ import annotations

from collections import deque

from outbox_plugin.coordination.claims import Claim
from outbox_plugin.core.topic_partition import TopicPartition

NEVER = float("-inf")
LOST_SECONDS = 15.0  # A message that the log has not taken by then never comes.


class HeldPartition:
    """A partition that we hold, as far as we have read the log. Times are monotonic seconds."""

    def __init__(self, claim: Claim, until: float, now: float) -> None:
        """Gained at `now`."""
        self.claim = claim
        self.until = until  # The lease: nobody else can hold it before.
        self.beaten = NEVER
        self.renewed = now
        self.reclaimed = NEVER  # When it was last claimed again, after it had become stale.
        self.repaired = NEVER  # Since when we set right what somebody said in our name.
        self.kept: int | None = None  # The offset that was last kept for good, and when.
        self.kept_at = NEVER


class UnansweredMessages:
    """When we sent each message that has not come back, by partition and timestamp: they come back in that order."""

    def __init__(self) -> None:
        """Nothing is sent yet."""
        self._sent: dict[TopicPartition, dict[int, deque[float]]] = {}

    def __bool__(self) -> bool:
        return any(queue for sent in self._sent.values() for queue in sent.values())

    def add(self, tp: TopicPartition, timestamp: int, now: float) -> None:
        """A message about `tp` with that timestamp is sent."""
        self._sent.setdefault(tp, {}).setdefault(timestamp, deque()).append(now)

    def answer(self, tp: TopicPartition, timestamp: int, now: float) -> float | None:
        """When the message that has come back was sent, or an earlier time; None when we sent none such."""
        sent = self._sent.get(tp, {})
        for earlier in [each for each in sent if each < timestamp]:
            del sent[earlier]  # Those were lost.
        queue = sent.get(timestamp)
        if not queue:
            return None
        while len(queue) > 1 and now - queue[0] > LOST_SECONDS:
            queue.popleft()
        return queue.popleft()
