"""Reads that would find nothing again, because the only new rows are those of a transaction that is still open.

Such a read walks all rows of a large open transaction and returns none. Repeated, it takes a whole core; and a read
that runs while the transaction commits does not see its rows, and delays them. To ask Postgres whether any
transaction has ended since costs far less.
"""

from __future__ import annotations

from outbox_plugin.core.intervals import LONG_POLL_SECONDS
from outbox_plugin.core.ports import ReadRequest


class UnchangedReads:
    """Remembers the last read if it took long and found nothing."""

    def __init__(self) -> None:
        self._request: ReadRequest | None = None
        self._snapshot = ""

    def may_skip(self, request: ReadRequest) -> bool:
        """Whether `request` is the one that found nothing; ask for the snapshot then, and call `is_unchanged`."""
        return request == self._request

    def is_unchanged(self, snapshot: str) -> bool:
        """Whether no transaction has ended since the snapshot was last asked for: the read would find nothing again."""
        before, self._snapshot = self._snapshot, snapshot
        return before == snapshot

    def read(self, request: ReadRequest, rows: int, seconds: float) -> None:
        """Update after a read.

        Args:
            request: what was read.
            rows: how many rows it returned.
            seconds: how long it took.
        """
        self._request = request if not rows and seconds > LONG_POLL_SECONDS else None

    def forget(self) -> None:
        """Forget the last read, because other rows are to be read now."""
        self._request = None
