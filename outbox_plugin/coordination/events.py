"""What happened to an instance's claims, as values: for logs, and for tests."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_plugin.core.topic_partition import TopicPartition


@dataclass(frozen=True, slots=True)
class ClaimGained:
    """The log, at `log_offset` of the place's coordination partition, gave us a partition; we begin at `offset`."""

    topic_partition: TopicPartition
    offset: int
    log_offset: int

    @property
    def place(self) -> TopicPartition:
        """The name that `topic_partition` had before; observers may use it."""
        return self.topic_partition


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """We hold a partition no more. `log_offset` is what the log had said by then; `why` is for people."""

    topic_partition: TopicPartition
    log_offset: int
    why: str

    @property
    def place(self) -> TopicPartition:
        """The name that `topic_partition` had before; observers may use it."""
        return self.topic_partition


ClaimEvent = ClaimGained | ClaimLost
