"""Published rows that are kept: a partition for each day, dropped as a whole when its time is over."""

from __future__ import annotations

import time
from typing import Any

import psycopg

from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import in_full
from outbox_plugin.settings import Settings

INTERVAL_SECONDS = 3_600.0  # Tomorrow's partition is made ahead, so a look an hour is plenty.
RETRY_SECONDS = 300.0  # Each attempt that somebody's lock ends may keep new rows waiting for a tenth of a second.


class HistoryPartitions:
    """Calls a function of the database that makes and drops partitions: a harvester need not own the table."""

    def __init__(self, settings: Settings) -> None:
        """`settings.retention` says how long a day is kept."""
        self._settings = settings
        self._next_at = 0.0

    def maintain(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Once an hour, make the partitions of the days to come, and drop the days whose time is over.

        What somebody's lock prevents, such as a dump's, is tried again after a few minutes; nobody waits for it.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + RETRY_SECONDS
        query = statement("history", "keep_days", in_full(connection, self._settings.table))
        [(done,)] = connection.execute(query, {"keep": self._settings.retention}).fetchall()
        if done:
            self._next_at = time.monotonic() + INTERVAL_SECONDS
