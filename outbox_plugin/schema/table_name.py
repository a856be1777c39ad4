"""Looks up the schema of an outbox."""

from __future__ import annotations

from typing import Any

import psycopg

from outbox_plugin.errors import ServerRefused
from outbox_plugin.schema.statements import statement


def with_schema(connection: psycopg.Connection[tuple[Any, ...]], table: str) -> str:
    """Return the table's name with its schema, looked up once: the search_path does not matter afterwards.

    Otherwise somebody who may create objects in an earlier schema of the search_path could replace the outbox by a
    table, or a view with a trigger, of theirs.

    Raises:
        ServerRefused: the name has no schema, and the search_path names none.
        psycopg.Error: whatever Postgres raises.
    """
    if "." in table:
        return table
    [(schema,)] = connection.execute(statement("place", "schema", table)).fetchall()
    if schema is None:
        raise ServerRefused("Postgres: the role's search_path names no schema; name one in OUTBOX_TABLE")
    return f"{schema}.{table}"
