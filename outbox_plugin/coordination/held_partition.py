"""A held partition with its lease, and the messages that the log has not answered yet."""

from __future__ import annotations

from collections import deque

from outbox_plugin.coordination.claims import Claim
from outbox_plugin.core.topic_partition import TopicPartition

NEVER = float("-inf")
LOST_SECONDS = 15.0  # A message that has not come back from the log by then may be lost.


class HeldPartition:
    """A partition that we hold, as far as we have read the log. Times are monotonic seconds."""

    def __init__(self, claim: Claim, until: float, now: float) -> None:
        """A partition that was gained just now.

        Args:
            claim: with which we gained it.
            until: when our lease of it ends, unless a heartbeat is read before.
            now: the time.
        """
        self.claim = claim
        self.until = until  # The end of the lease: nobody else can hold the partition before it.
        self.beaten = NEVER
        self.renewed = now
        self.reclaimed = NEVER  # When we last claimed it again, after it had become stale.
        self.repaired = NEVER  # When we began to correct a message that somebody wrote in our name.
        self.kept: int | None = None  # The offset that was last written to the state topic, and when.
        self.kept_at = NEVER


class UnansweredMessages:
    """When we sent each message that has not come back, by partition and timestamp. They come back in that order."""

    def __init__(self) -> None:
        """Nothing is sent yet."""
        self._sent: dict[TopicPartition, dict[int, deque[float]]] = {}

    def __bool__(self) -> bool:
        return any(queue for sent in self._sent.values() for queue in sent.values())

    def add(self, tp: TopicPartition, timestamp: int, now: float) -> None:
        """Note that a message was sent.

        Args:
            tp: the partition that the message is about.
            timestamp: the message's own, in seconds.
            now: when it was sent.
        """
        self._sent.setdefault(tp, {}).setdefault(timestamp, deque()).append(now)

    def has(self, tp: TopicPartition, timestamp: int) -> bool:
        """Whether a message about the partition that has this timestamp has not come back."""
        return bool(self._sent.get(tp, {}).get(timestamp))

    def answer(self, tp: TopicPartition, timestamp: int, now: float) -> float | None:
        """When the message that has come back was sent, or an earlier time; None if we sent no such message.

        Of messages with one timestamp, which are many while the brokers' clock stands back, an old one may be lost. So
        the first that is not old has come back. If all are old, the log is late, and each will come back in its turn.

        Args:
            tp: the partition that the message is about.
            timestamp: the message's own, in seconds.
            now: when it has come back.
        """
        sent = self._sent.get(tp, {})
        if not (queue := sent.get(timestamp)):
            return None
        for earlier in [each for each in sent if each < timestamp]:
            del sent[earlier]  # They were lost.
        place = next((number for number, at in enumerate(queue) if now - at <= LOST_SECONDS), 0)
        at = queue[place]
        del queue[place]
        return at
