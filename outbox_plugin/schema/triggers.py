"""The statements that create and drop the triggers on the table in which an outbox's rows are stored."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.errors import ServerRefused
from outbox_plugin.schema.statements import identifier, statement
from outbox_plugin.settings import Settings


def stored_table(connection: psycopg.Connection[tuple[Any, ...]], table: str) -> sql.Composable:
    """The name of the table that the rows are stored in: the outbox, or the table that it is a view of.

    Raises:
        ServerRefused: it is a view of anything but one table.
    """
    for schema, name, _ in connection.execute(statement("identity", "stored", table)).fetchall():
        if name is None:
            raise ServerRefused(
                f"Postgres: {table} is a view, but not of one table: an outbox that is a view shows the rows of one "
                "table, and nothing else"
            )
        return identifier((schema, name))
    return identifier(table.rsplit(".", 1))  # It does not exist yet: the first migration creates it.


def notice_truncation(connection: psycopg.Connection[tuple[Any, ...]], table: str) -> sql.Composed:
    """The statement that creates the trigger which notices a TRUNCATE of the outbox.

    Raises:
        ServerRefused: the outbox is a view of anything but one table.
    """
    return statement("migrate", "notice_truncation", table, stored=stored_table(connection, table))


def wake_up_function(table: str, shards: int) -> sql.Composed:
    """The statement that creates the function by which writers wake the leaders of `shards` shards."""
    awake = [statement("wake_up", "awake", table, shard=sql.Literal(shard)) for shard in range(shards)]
    return statement("wake_up", "create_function", table, all_awake=sql.SQL(" AND ").join(awake))


def wake_up_trigger(
    connection: psycopg.Connection[tuple[Any, ...]], settings: Settings, table: str, shards: int
) -> sql.Composed:
    """The statement that creates the trigger by which writers wake leaders.

    Args:
        connection: to the outbox's database.
        settings: name the outbox.
        table: the outbox's name with its schema.
        shards: how many shards have leaders to wake.

    Raises:
        ServerRefused: the outbox is a view of anything but one table.
    """
    parts = {"table_name": sql.Literal(settings.table), "shards": sql.Literal(shards)}
    return statement("wake_up", "create_trigger", table, stored=stored_table(connection, table), **parts)


def drop_wake_up_trigger(connection: psycopg.Connection[tuple[Any, ...]], table: str) -> sql.Composed:
    """The statement that drops the trigger by which writers wake leaders.

    Raises:
        ServerRefused: the outbox is a view of anything but one table.
    """
    return statement("wake_up", "drop_trigger", table, stored=stored_table(connection, table))
