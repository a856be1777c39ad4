"""Decides how many rows of a backlog go into a transaction while live rows come, which wait for that transaction.

A transaction takes a time of its own, and some microseconds more for each row. If it has few rows, live rows wait for a
short time, but most of the time is the transactions' own, and the backlog drains slowly. So the nearer Kafka is, the
fewer rows a transaction gets. The backlog drains at some 60 % of its usual speed, and live rows wait for some four
times the transaction's own time.

That time is measured before there is a backlog. Beside one, all takes longer, and more rows would make it longer still.
A leader that takes over in the middle of a backlog has measured nothing. When live rows go before it, its next two
transactions have no rows, and show the time.
"""

from __future__ import annotations

from outbox_plugin.core.window import ROWS_PER_WINDOW

MIN_ROWS, MAX_ROWS = 500, ROWS_PER_WINDOW
_ROWS_PER_SECOND = 200_000  # Of the transaction's own time. So many rows take about 1.5 seconds on one processor.
_OWN_SECONDS = 0.005  # Until it is measured: that of a Kafka on the same machine.
_FEW_ROWS = 20  # A transaction with so few shows its own time.
_SLOWER = 1.1  # A longer time counts up to this multiple of the last one, because it may be a hiccup.
_ENOUGH = 2  # Measured transactions. The first one alone may be a hiccup, too.


class RowsBesideLive:
    """Measures transactions. The thread that publishes reports them; any thread may ask for `rows`."""

    def __init__(self) -> None:
        """Nothing is measured yet."""
        self._own_seconds = _OWN_SECONDS
        self._measured = 0

    @property
    def is_measured(self) -> bool:
        """Whether enough transactions have shown their own time."""
        return self._measured >= _ENOUGH

    @property
    def rows(self) -> int:
        """How many rows the next transaction gets from the backlog."""
        return max(MIN_ROWS, min(MAX_ROWS, round(_ROWS_PER_SECOND * self._own_seconds)))

    def published(self, rows: int, seconds: float) -> None:
        """Take in that a transaction with so many rows took so long, while there was no backlog."""
        if 0 < rows <= _FEW_ROWS:
            self.measured(seconds)

    def measured(self, seconds: float) -> None:
        """Take in that a transaction without rows took so long; beside a backlog, until `is_measured` is true."""
        self._own_seconds = min(seconds, _SLOWER * self._own_seconds) if self._measured else seconds
        self._measured += 1
