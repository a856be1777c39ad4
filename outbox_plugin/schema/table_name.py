"""An outbox's name with its schema."""

from __future__ import annotations

from typing import Any

import psycopg

from outbox_plugin.errors import ServerRefused
from outbox_plugin.schema.statements import statement


def in_full(connection: psycopg.Connection[tuple[Any, ...]], table: str) -> str:
    """The outbox's name with its schema, looked up once: from then on, the search_path has no say.

    Else who may create in a schema that comes first could put a table, or a view with a trigger, in the place of ours.

    Raises:
        ServerRefused: it has no schema, and the search_path names none.
        psycopg.Error: whatever Postgres says.
    """
    if "." in table:
        return table
    [(schema,)] = connection.execute(statement("place", "schema", table)).fetchall()
    if schema is None:
        raise ServerRefused("Postgres: the role's search_path names no schema; name one in OUTBOX_TABLE")
    return f"{schema}.{table}"
