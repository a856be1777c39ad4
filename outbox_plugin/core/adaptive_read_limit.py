"""Adapts the limit of a read, in rows, to their size, so that the rows of a read stay within a limit of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_plugin.core.row import OutboxRow, length_of
from outbox_plugin.core.window import BYTES_PER_WINDOW, ROWS_PER_WINDOW

_FEWEST_ROWS = 8
_SAMPLES = 100


class AdaptiveReadLimit:
    """Follows the size of the rows: `rows` of them have about `BYTES_PER_WINDOW` bytes, if they are like the last ones.

    Rows that are much larger are read apart: see `ReadRequest.large_bytes`.
    """

    def __init__(self) -> None:
        self.rows = ROWS_PER_WINDOW

    def update(self, rows: Sequence[OutboxRow]) -> None:
        """Measure a sample of the `rows` that were read; there is at least one."""
        sizes = [length_of(row) for row in rows[:: 1 + len(rows) // _SAMPLES]]
        fitting = BYTES_PER_WINDOW * len(sizes) // max(1, sum(sizes))
        self.rows = min(ROWS_PER_WINDOW, max(_FEWEST_ROWS, fitting))
