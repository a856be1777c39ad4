"""Published rows that are kept: a partition for each day, dropped as a whole when its time is over."""

from __future__ import annotations

import re
import time
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

LOOK_SECONDS = 3_600.0  # Two days are made ahead, so a look an hour is plenty.
_DAY = re.compile(r"outbox_history_(\d{8})")


class History:
    """Keeps the days of the history on the connection that fills it."""

    def __init__(self, settings: Settings, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """`settings.retention` says how long a day is kept."""
        self._settings = settings
        self._connection = connection
        self._look_at = 0.0

    def keep_days(self) -> None:
        """Once an hour: make the partitions of today and tomorrow (UTC), and drop the days whose time is over.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        if time.monotonic() < self._look_at:
            return
        with self._connection.transaction():  # Several shards may do so at once.
            self._connection.execute(self._query("lock_days"))
            row = self._connection.execute("SELECT pg_catalog.now()").fetchone()
            today = _day_of(row[0]) if row else datetime.now(UTC).date()
            days = {self._day(name) for (name,) in self._connection.execute(self._query("days")).fetchall()}
            for day in sorted({today, today + timedelta(days=1)} - days):
                self._connection.execute(self._partition("create_day", day))
            if self._settings.retention:
                for day in sorted(each for each in days if each and each < today - self._settings.retention):
                    self._connection.execute(self._partition("drop_day", day))
        self._look_at = time.monotonic() + LOOK_SECONDS

    def _query(self, name: str) -> sql.Composed:
        return statement("history", name, self._settings.table)

    def _partition(self, name: str, day: date) -> sql.Composed:
        *schema, _ = self._settings.table.split(".")
        return statement(
            "history",
            name,
            self._settings.table,
            partition=sql.Identifier(*schema, f"outbox_history_{day:%Y%m%d}"),
            day=sql.Literal(f"{day.isoformat()} 00:00:00+00"),
            next_day=sql.Literal(f"{(day + timedelta(days=1)).isoformat()} 00:00:00+00"),
        )

    @staticmethod
    def _day(partition: str) -> date | None:
        found = _DAY.fullmatch(partition)
        return datetime.strptime(found[1], "%Y%m%d").replace(tzinfo=UTC).date() if found else None


def _day_of(moment: datetime) -> date:
    return moment.astimezone(UTC).date()
