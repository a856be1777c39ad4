"""Changes the outbox's table while rows are in flight, as an application's migrations may do."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from psycopg import sql

from outbox_plugin.bench.faults import Kind
from outbox_plugin.bench.temporary_outbox import connect, table_of
from outbox_plugin.settings import Settings

TIMES = 5  # How often the table is changed while a burst of rows drains.


def change_table(kind: Kind, settings: Settings, times: int = TIMES) -> None:
    """Rewrite the table, update all of its rows, or VACUUM it FULL.

    Args:
        kind: whether the table is rewritten, all its rows are updated, or VACUUM FULL runs.
        settings: of the outbox.
        times: how many times, one after the other. Twice or more shows what follows directly upon a change.

    Raises:
        psycopg.Error: Postgres is away, or chose this statement as the victim of a deadlock; do it again later.
    """
    with connect(settings, autocommit=True) as connection:
        change = _CHANGES[kind]
        for number in range(times):
            change(connection, table_of(settings), number)


def _rewrite(connection: psycopg.Connection[tuple[object]], table: sql.Identifier, number: int) -> None:
    """Add a column whose default is volatile, which writes every row again; then drop it, which writes none."""
    column = sql.Identifier(f"added_{number}")
    connection.execute(
        sql.SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {} UUID DEFAULT gen_random_uuid()").format(table, column)
    )
    connection.execute(sql.SQL("ALTER TABLE {} DROP COLUMN {}").format(table, column))


def _update(connection: psycopg.Connection[tuple[object]], table: sql.Identifier, number: int) -> None:
    """Give every row a value in a column of the application's own."""
    connection.execute(sql.SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS note INT").format(table))
    connection.execute(sql.SQL("UPDATE {} SET note = %s").format(table), (number,))


def _vacuum(connection: psycopg.Connection[tuple[object]], table: sql.Identifier, _: int) -> None:
    connection.execute(sql.SQL("VACUUM FULL {}").format(table))


_CHANGES: dict[Kind, Callable[[psycopg.Connection[tuple[object]], sql.Identifier, int], None]] = {
    "table rewrite": _rewrite,
    "table update": _update,
    "table vacuum": _vacuum,
}
