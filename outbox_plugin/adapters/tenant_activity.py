"""Sees, on one connection, which of many tenants' outboxes have rows to relay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psycopg

from outbox_plugin.core.resting_tenants import OutboxActivity
from outbox_plugin.schema.connection import connect, errors_as_unavailable, pipeline
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

SCHEMAS_AT_ONCE = 500  # Each takes a lock for a moment. All sessions share room for 6,400 by default.
CHECK_SECONDS = 1.0  # For the outboxes that are checked together. Meanwhile no other tenant is woken.


class TenantActivityReader:
    """Reads how far the tenants' ids are, which costs little, and of some tenants whether their outboxes have rows."""

    def __init__(self, pattern: Settings) -> None:
        """Nothing is read yet, and no connection is open.

        Args:
            pattern: their `table` matches the tenants' outboxes.
        """
        self._pattern = pattern
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def activity(self, schemas: Sequence[str]) -> dict[str, OutboxActivity]:
        """What tells of these tenants whether rows were inserted. A tenant of whose ids nothing can be seen is missing.

        Raises:
            StoreUnavailable: Postgres is away, or refuses.
        """
        with errors_as_unavailable():
            if self._connection is None or self._connection.closed:
                self._connection = connect(self._pattern, purpose="outbox tenants (at rest)")
            return {
                schema: OutboxActivity(drawn, is_writing)
                for first in range(0, len(schemas), SCHEMAS_AT_ONCE)
                for schema, drawn, is_writing in self._drawn_ids(schemas[first : first + SCHEMAS_AT_ONCE])
            }

    def have_rows(self, schemas: Sequence[str]) -> dict[str, bool]:
        """Whether these tenants' outboxes have rows, after `activity`.

        One that cannot be read, because it is locked, was changed, or takes too long, counts as having some: its own
        harvester will say what is wrong. If many take long, the last ones are left out.

        Raises:
            StoreUnavailable: Postgres is away, or refuses.
        """
        until, found = time.monotonic() + CHECK_SECONDS, {}
        with errors_as_unavailable():
            for schema in schemas:
                found[schema] = self._has_rows(schema)
                if time.monotonic() >= until:
                    break
        return found

    def _drawn_ids(self, schemas: Sequence[str]) -> list[tuple[Any, ...]]:
        _, _, name = self._pattern.table.partition(".")
        return self._run("short_lock_timeout", "drawn_ids", name, {"name": name, "schemas": list(schemas)})

    def _has_rows(self, schema: str) -> bool:
        try:
            [(has_rows,)] = self._run("short_time_outs", "has_rows", self._pattern.table_of_schema(schema), {})
        except psycopg.Error:
            if self._open.closed:
                raise
            return True
        return bool(has_rows)

    def _run(self, limits: str, name: str, table: str, values: dict[str, object]) -> list[tuple[Any, ...]]:
        with pipeline(self._open):
            self._open.execute(statement("tenants", limits, table))
            found = self._open.execute(statement("tenants", name, table), values)
        return found.fetchall()

    @property
    def _open(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._connection is None:
            raise psycopg.OperationalError("the connection is closed")
        return self._connection

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        with suppress(psycopg.Error):
            if self._connection is not None:
                self._connection.close()
