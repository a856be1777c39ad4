"""The write side: emit events in the caller's own transaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from outbox_plugin.event import Event
from outbox_plugin.schema.statements import statement


class Outbox:
    """Writes events to the outbox in the caller's transaction: they leave if it commits, and only then.

    Example:
        with psycopg.connect(dsn) as connection:
            connection.execute("UPDATE account SET …")
            Outbox().emit(connection, Event(topic="accounts", key="17", type="Debited", value={"by": 5}))
    """

    def __init__(self, table: str = "outbox") -> None:
        """`table` is the outbox table, optionally with its schema."""
        self._insert = statement("emit", "insert_event", table)

    def emit(self, connection: psycopg.Connection[Any], event: Event) -> None:
        """Write one event in `connection`'s transaction.

        Raises:
            InvalidEvent: the event's value is no JSON.
        """
        self.emit_many(connection, [event])

    def emit_many(self, connection: psycopg.Connection[Any], events: Iterable[Event]) -> int:
        """Write `events` in `connection`'s transaction, in their order; returns how many.

        Raises:
            InvalidEvent: an event's value is no JSON; nothing of this call is written.
        """
        rows = [_row(event) for event in events]
        if rows:
            with connection.cursor() as cursor:
                cursor.executemany(self._insert, rows)
        return len(rows)


def _row(event: Event) -> tuple[str, str, str | None, list[str], list[str]]:
    headers = event.header_items()
    return event.topic, event.key, event.value_text(), [name for name, _ in headers], [text for _, text in headers]
