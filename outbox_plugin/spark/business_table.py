"""Checks that a business table fits the DataFrame before a job starts, so that a mismatch is reported at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.errors import UserError
from outbox_plugin.schema.statements import statement
from outbox_plugin.spark.columns import BusinessColumnWrong, RowForm


class BusinessTableMissing(UserError):
    """There is no business table of that name."""


def check_business_table(
    connection: psycopg.Connection[tuple[Any, ...]], outbox: str, table: str, form: RowForm
) -> None:
    """Check that rows of the form fit into the business table.

    Args:
        connection: to the database of the outbox.
        outbox: the outbox table.
        table: the business table, perhaps with its schema.
        form: the columns of the DataFrame that are to be written.

    Raises:
        BusinessTableMissing: there is no such table.
        BusinessColumnWrong: the table lacks a column, or would store other values than the DataFrame has.
    """
    named = {"business": sql.Identifier(*table.split(".")).as_string()}
    columns = connection.execute(statement("staging", "business_columns", outbox), named).fetchall()
    if not columns:
        raise BusinessTableMissing(f"there is no business table {table!r}, or it has no columns: create it first")
    is_bytes = {name: of_bytes for name, of_bytes, _ in columns}
    if lacking := [name for name in form.names if name not in is_bytes]:
        raise BusinessColumnWrong(f"the business table {table!r} lacks {_listed(lacking)}; it has {_listed(is_bytes)}")
    if binary := [name for name in form.of_bytes if not is_bytes[name]]:
        raise BusinessColumnWrong(
            f"the column {binary[0]!r} is binary, but that of the business table {table!r} is not bytea; "
            "make it a string first, as with decode"
        )
    null = [name for name, _, null in columns if null and name in form.left_out]
    if null:
        raise BusinessColumnWrong(
            f"the business table {table!r} has {_listed(null)}, which would be null, because the DataFrame's column of "
            f"that name belongs to the event: write with OutboxWrite(settings).table(rows, {table!r}).events(events) "
            "instead"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
