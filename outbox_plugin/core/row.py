"""A row of the outbox as the harvester reads it."""

from __future__ import annotations

from typing import NamedTuple


class OutboxRow(NamedTuple):
    """One row; a NamedTuple because a busy harvester makes some hundred thousand of them in a second.

    `create_time` is in microseconds since Postgres' epoch, 2000-01-01 UTC, as Postgres sends it: a `datetime` takes
    four times as long to make, and cannot hold infinity. `horizon` is the same for all rows of a read: the first
    transaction id that the read could not see.
    """

    id: int
    create_time: int
    topic: str
    key: str
    value: str | bytes | None
    header_keys: list[str]
    header_values: list[str]
    horizon: int
