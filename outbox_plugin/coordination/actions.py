"""A member's actions: values that `Instance` carries out, in order."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_plugin.coordination.events import ClaimEvent
from outbox_plugin.coordination.messages import Message
from outbox_plugin.core.topic_partition import TopicPartition


@dataclass(frozen=True, slots=True)
class Send:
    """Write a message to a partition of the coordination topic."""

    message: Message
    partition: int


@dataclass(frozen=True, slots=True)
class KeepPosition:
    """Write to the state topic where the group goes on in a partition, by the log's time `at`."""

    topic_partition: TopicPartition
    offset: int
    topic_ids: tuple[str, ...]  # Of the topic that the offset belongs to, and of those before it, the latest first.
    at: float


MemberAction = Send | KeepPosition | ClaimEvent
