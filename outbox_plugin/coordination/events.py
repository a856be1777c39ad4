"""Events of an instance's claims, for logs and tests."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_plugin.core.topic_partition import TopicPartition


@dataclass(frozen=True, slots=True)
class ClaimGained:
    """The log gave us a partition, at `log_offset` of its coordination partition. We begin at `offset`."""

    topic_partition: TopicPartition
    offset: int
    log_offset: int


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """We no longer hold a partition. `log_offset`: how far we had read the log; `why`: the reason, for people."""

    topic_partition: TopicPartition
    log_offset: int
    why: str


ClaimEvent = ClaimGained | ClaimLost
