"""Decides whether a read that found no row may be skipped, because the same read would find no row again.

While a large transaction is open, each read walks all its rows and returns none. Repeated, such a read takes a whole
core. It also delays the rows: a read that runs while the transaction commits does not see them. It costs far less to
ask Postgres whether any transaction has ended since.
"""

from __future__ import annotations

from outbox_plugin.core.intervals import LONG_POLL_SECONDS
from outbox_plugin.core.postgres_ports import ReadRequest


class RepeatedEmptyReads:
    """Remembers the last read if it took long and found no row."""

    def __init__(self) -> None:
        self._request: ReadRequest | None = None
        self._snapshot = ""

    def may_skip(self, request: ReadRequest) -> bool:
        """Whether `request` is the one that found no row. Then ask for the snapshot, and call `is_unchanged`."""
        return request == self._request

    def is_unchanged(self, snapshot: str) -> bool:
        """Whether no transaction has ended since the snapshot was last asked for: the read would find no row again."""
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
