"""Checks the columns of a table that is to be an outbox."""

from __future__ import annotations

from typing import Any

import psycopg

from outbox_plugin.errors import SchemaMissing
from outbox_plugin.schema.statements import statement


def check_columns(connection: psycopg.Connection[tuple[Any, ...]], table: str, called: str) -> None:
    """Check that `table`, or a view, has all columns that a harvester needs, of types that it can read.

    Args:
        connection: to the outbox's database.
        table: the outbox's name with its schema.
        called: the name by which the user knows it.

    Raises:
        SchemaMissing: it lacks a column, has one of another type, or is neither a table nor a view.
    """
    for (kind,) in connection.execute(statement("identity", "unsupported_kind", table)):
        raise SchemaMissing(f"{called!r} is {kind}; an outbox is a table, or a view of one")
    if missing := [column for (column,) in connection.execute(statement("identity", "columns", table))]:
        raise SchemaMissing(f"the table {called!r} lacks the column(s) {', '.join(missing)}")
    for column, kind, expected in connection.execute(statement("identity", "columns_of_another_type", table)):
        raise SchemaMissing(f"the column {column} of {called!r} is a {kind}; a harvester expects {expected}")
