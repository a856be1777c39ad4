"""Creates and upgrades the outbox's tables.

Migrations are files `NNNN_pre_what.sql` or `NNNN_post_what.sql`, applied in the order of their names: a `pre` file may
run before the new code is deployed, a `post` file only after the old code is gone. All run in one transaction, under a
lock, so that two at once, or one that is killed, leave the database whole.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.schema.connection import connect_patiently, reported_as_refusal
from outbox_plugin.schema.orphans import drop_orphans
from outbox_plugin.schema.statements import check_name, compose, statement
from outbox_plugin.settings import Settings


def migrate(settings: Settings, *, wake_up: bool | None = None) -> list[str]:
    """Bring the outbox's tables up to date; safe to run twice, and by two at once.

    An existing outbox table, such as goharvest's, keeps its form; where the settings say at-least-once, the pages of a
    table that has no fillfactor of its own leave room for marked rows from now on. Staging tables of Spark jobs that
    are gone are removed; the schema for such tables is made, if the role may make one. `wake_up` installs, or removes,
    the trigger by which writers wake the harvesters that sleep, for as many shards as there are, or as the settings say
    if those are more; None leaves that as it is.

    Returns:
        The names of the migrations that were applied now; none when all had been.

    Raises:
        ServerRefused: the database cannot be reached, or does not let us create tables.
        InvalidSetting: the table has been migrated by another name of it.
    """
    table = settings.table
    with reported_as_refusal(settings), connect_patiently(settings) as connection, connection.transaction():

        def run(query: str, /, **values: str) -> list[str]:
            cursor = connection.execute(statement("migrate", query, table), values)
            return [row[0] for row in cursor.fetchall()] if cursor.description else []

        run("lock")
        run("create_ledger")
        run("forget_dropped_table", table=table)
        applied = set(run("applied", table=table))
        pending = {name: text for name, text in migrations().items() if name not in applied}
        for name, text in pending.items():
            connection.execute(compose(text, table))
            run("record", table=table, name=name)
        if not run("notices_truncation"):
            run("notice_truncation")
        check_name(table, connection.execute(statement("identity", "known_as", table)).fetchall())
        run("identify", table=table)
        if run("may_make_staging_schema"):
            run("make_staging_schema")
        if settings.delivery == "at-least-once" and run("may_make_room", table=table):
            run("make_room")
        if wake_up is not None:
            _wake_up(connection, settings, install=wake_up)
        drop_orphans(connection, table)
    return list(pending)


def _wake_up(connection: psycopg.Connection[tuple[Any, ...]], settings: Settings, *, install: bool) -> None:
    table = settings.table
    if not install:
        connection.execute(statement("wake_up", "drop_trigger", table))
        return
    asked = {"table": table, "shards": settings.shards}
    [(shards,)] = connection.execute(statement("wake_up", "shards", table), asked).fetchall()
    awake = [statement("wake_up", "awake", table, shard=sql.Literal(shard)) for shard in range(shards)]
    connection.execute(statement("wake_up", "create_function", table, all_awake=sql.SQL(" AND ").join(awake)))
    arguments = {"table_name": sql.Literal(table), "shards": sql.Literal(shards)}
    connection.execute(statement("wake_up", "create_trigger", table, **arguments))


def migrations() -> dict[str, str]:
    """Every migration's text by its name, in the order in which they apply."""
    folder = files("outbox_plugin.schema").joinpath("migrations")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return {name.removesuffix(".sql"): folder.joinpath(name).read_text(encoding="utf-8") for name in names}
