"""Bad rows, as an operator sees and mends them: parked lanes and dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from outbox_plugin.core.lanes import ParkedLane
from outbox_plugin.operate.ordering import asking, ordering
from outbox_plugin.settings import Settings


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that Kafka refused, and that the outbox went on without."""

    id: int
    topic: str
    key: str
    reason: str
    buried_at: datetime


def parked_lanes(settings: Settings) -> list[ParkedLane]:
    """The lanes that wait.

    Raises:
        SchemaMissing, ServerRefused: see `ordering`.
    """
    with asking(settings) as orders:
        return [ParkedLane(*row) for row in orders.run("control", "parked")]


def release(settings: Settings, *, topic: str | None = None, key: str | None = None) -> list[ParkedLane]:
    """Let parked lanes go on, in their order: of a topic, of a key, or all. A row that is still bad parks again.

    Raises:
        SchemaMissing, ServerRefused: see `ordering`.
    """
    with ordering(settings) as orders:
        return [ParkedLane(*row) for row in orders.run("control", "release", topic=topic, key=key)]


def dead_letters(settings: Settings) -> list[DeadLetter]:
    """The dead letters, earliest first.

    Raises:
        SchemaMissing, ServerRefused: see `ordering`.
    """
    with asking(settings) as orders:
        return [DeadLetter(*row) for row in orders.run("control", "dead_letters")]


def retry_dead_letters(settings: Settings, ids: Sequence[int] | None = None) -> int:
    """Make dead letters rows of the outbox again, behind all others; all where `ids` is None. Returns how many.

    Raises:
        SchemaMissing, ServerRefused: see `ordering`.
    """
    return _each(settings, "retry_dead_letters", ids)


def discard_dead_letters(settings: Settings, ids: Sequence[int] | None = None) -> int:
    """Forget dead letters; all where `ids` is None. Returns how many.

    Raises:
        SchemaMissing, ServerRefused: see `ordering`.
    """
    return _each(settings, "discard_dead_letters", ids)


def _each(settings: Settings, name: str, ids: Sequence[int] | None) -> int:
    with ordering(settings) as orders:
        return orders.run("control", name, ids=None if ids is None else list(ids)).rowcount
