"""A row of the outbox as the harvester reads it."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple


class OutboxRow(NamedTuple):
    """One row; a NamedTuple because a busy harvester makes some hundred thousand of them in a second.

    `horizon` is the same for all rows of a read: the first transaction id that the read could not see.
    """

    id: int
    create_time: datetime
    topic: str
    key: str
    value: str | bytes | None
    header_keys: list[str]
    header_values: list[str]
    horizon: int
