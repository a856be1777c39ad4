"""What happens while an inbox handles records, as values. Whoever observes is called once a transaction, and when
Kafka has deleted offsets that were not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outbox_plugin.inbox.received import Received


@dataclass(frozen=True, slots=True)
class RecordsDone:
    """A transaction was committed. It handled `records`, but for those `skipped`, which had been handled before."""

    records: Sequence[Received]
    skipped: Sequence[Received]


@dataclass(frozen=True, slots=True)
class RecordFailed:
    """The record failed, and is tried again."""

    record: Received


@dataclass(frozen=True, slots=True)
class RecordDeadLettered:
    """The record became a dead letter, or did so again."""

    record: Received


@dataclass(frozen=True, slots=True)
class TakenHandled:
    """A worker has handled what it took, well or not."""

    seconds: float


@dataclass(frozen=True, slots=True)
class OffsetsDeletedUnread:
    """Kafka has deleted so many offsets of the topic before they were read."""

    topic: str
    offsets: int


InboxEvent = RecordsDone | RecordFailed | RecordDeadLettered | TakenHandled | OffsetsDeletedUnread
Observer = Callable[[InboxEvent], None]


def ignore(event: InboxEvent) -> None:
    """Observe nothing."""
