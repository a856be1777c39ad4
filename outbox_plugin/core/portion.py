"""How many rows to ask for at once, so that they are in bounds together, whatever the size of values and headers."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_plugin.core.row import OutboxRow, length_of
from outbox_plugin.core.window import BYTES_PER_WINDOW, ROWS_PER_WINDOW

_FEWEST_ROWS = 8
_SAMPLES = 100


class Portion:
    """Follows the size of the rows: `rows` of them have `BYTES_PER_WINDOW` together, if they are like the last.

    For those that are not, there is `Wanted.large_bytes`.
    """

    def __init__(self) -> None:
        self.rows = ROWS_PER_WINDOW

    def learned(self, rows: Sequence[OutboxRow]) -> None:
        """Look at some of the `rows` that were read, of which there is at least one."""
        sizes = [length_of(row) for row in rows[:: 1 + len(rows) // _SAMPLES]]
        fitting = BYTES_PER_WINDOW * len(sizes) // max(1, sum(sizes))
        self.rows = min(ROWS_PER_WINDOW, max(_FEWEST_ROWS, fitting))
