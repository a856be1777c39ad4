"""Wakes a harvester when a row was inserted: LISTEN, on a connection of its own."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from typing import Any

import psycopg

from outbox_plugin.schema.connection import connect, errors_as_unavailable
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings


class PostgresWakeUp:
    """`WakeUp` on LISTEN and a lock that writers see. Needs a session of its own: no transaction-mode pooler."""

    def __init__(self, settings: Settings, shard: int) -> None:
        """Nothing is connected before a leader is about to sleep: rows that it has to relay first do not wait for that.

        Args:
            settings: which outbox.
            shard: whose leader is woken.
        """
        self._settings = settings
        self._shard = shard
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._table_with_schema = settings.table
        self._pipe: tuple[int, int] | None = os.pipe()  # To read from, and to write to.
        self._pipe_lock = threading.Lock()  # A closed descriptor's number may be in use again a moment later.

    def _listening_connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        """The connection, which hears what is notified from now on.

        Raises:
            psycopg.Error: Postgres is away, or refuses us.
        """
        if self._connection is None:
            connection = connect(self._settings, purpose="outbox harvester (wake-up)")
            try:
                self._table_with_schema = with_schema(connection, self._settings.table)
                connection.execute(statement("wake_up", "listen", self._table_with_schema))
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def arm(self) -> bool:
        """Take the wake-up lock. Returns False if a writer holds it; poll once more before you wait."""
        return self._ask("arm")

    def wait(self, seconds: float) -> bool:
        """Wait for a writer's notification or `interrupt`. Returns False after `seconds`."""
        with errors_as_unavailable():
            connection = self._listening_connection()
            if self._is_notified(connection):  # The notification came with the answer to a query.
                return True
            # Not select(): it raises ValueError for a descriptor above 1,023, which a large process reaches.
            poll = select.poll()
            interrupted = self._pipe[0] if self._pipe else -1
            for descriptor in (connection.fileno(), interrupted):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * seconds)}
            return self._is_notified(connection) or interrupted in ready

    def _is_notified(self, connection: psycopg.Connection[tuple[Any, ...]]) -> bool:
        """Take in all notifications that have arrived. Returns True if one of them is for this outbox."""
        return self._settings.table in {notice.payload for notice in connection.notifies(timeout=0)}

    def interrupt(self) -> None:
        """End a `wait` that another thread is in."""
        with self._pipe_lock:
            if self._pipe:
                os.write(self._pipe[1], b"!")

    def disarm(self) -> None:
        """Release the wake-up lock: writers no longer notify."""
        self._ask("disarm")

    def _ask(self, name: str) -> bool:
        values = {"table": self._settings.table, "shard": self._shard}
        with errors_as_unavailable():
            connection = self._listening_connection()
            row = connection.execute(statement("wake_up", name, self._table_with_schema), values).fetchone()
        return bool(row and row[0])

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
        with self._pipe_lock:
            for descriptor in self._pipe or ():
                os.close(descriptor)
            self._pipe = None
