"""Keeps published rows for a while: a partition for each day, which is dropped as a whole when its time is over."""

from __future__ import annotations

import time
from typing import Any

import psycopg

from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings

INTERVAL_SECONDS = 3_600.0  # Tomorrow's partition is made ahead, so once an hour is enough.
RETRY_SECONDS = 300.0  # An attempt may hold new rows up for a tenth of a second, if somebody else has a lock.


class HistoryPartitions:
    """Calls a function of the database that makes and drops partitions: a harvester need not own the table."""

    def __init__(self, settings: Settings) -> None:
        """`settings.retention` says how long a day is kept; None if the outbox keeps no rows."""
        self._settings = settings
        self._is_recorded = False
        self._next_at = 0.0

    def maintain(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Once an hour, make the partitions of the days to come, and drop the days whose time is over.

        It does not wait for a lock that somebody else holds, such as a dump. It tries again after a few minutes. Other
        outboxes may keep their rows for longer in the same days: so the first call records how long this one does.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        keep, name = self._settings.retention or None, self._settings.table
        if time.monotonic() < self._next_at or (keep is None and self._is_recorded):
            return
        self._next_at = time.monotonic() + RETRY_SECONDS
        table = with_schema(connection, name)
        if not self._is_recorded:
            connection.execute(statement("history", "keep_for", table), {"keep": keep, "table": name})
            self._is_recorded = True
        if keep is None:
            return
        [(done,)] = connection.execute(statement("history", "keep_days", table), {"keep": keep}).fetchall()
        if done:
            self._next_at = time.monotonic() + INTERVAL_SECONDS
