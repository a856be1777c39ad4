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
        """`settings.retention` says how long a day is kept."""
        self._settings = settings
        self._next_at = 0.0

    def maintain(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Once an hour, make the partitions of the days to come, and drop the days whose time is over.

        A day stays for the longest time that an outbox of the schema has registered. It does not wait for a lock that
        somebody else holds, such as a dump. It tries again after a few minutes.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + RETRY_SECONDS
        query = statement("history", "keep_days", with_schema(connection, self._settings.table))
        [(done,)] = connection.execute(query, {"keep": self._settings.retention}).fetchall()
        if done:
            self._next_at = time.monotonic() + INTERVAL_SECONDS
