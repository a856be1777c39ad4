"""Creates and upgrades the outbox's tables.

Migrations are files `NNNN_pre_what.sql` or `NNNN_post_what.sql`, applied in the order of their names: a `pre` file may
run before the new code is deployed, a `post` file only after the old code is gone. All run in one transaction, under a
lock, so that the database stays consistent if two run at once, or one is killed.

While a migration waits for a lock on a table, everybody who needs the table waits behind it: one long report would stop
all who emit. So it waits for a second only, rolls back, lets the others proceed, and tries again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.errors import InvalidSetting, ServerRefused
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.columns import check_columns
from outbox_plugin.schema.connection import command_connection
from outbox_plugin.schema.orphaned_staging_tables import drop_orphans
from outbox_plugin.schema.statements import check_name, compose, statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.schema.triggers import drop_wake_up_trigger, notice_truncation, wake_up_function, wake_up_trigger
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.migrate")

PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 2.0  # Between two tries.


def migrate(settings: Settings, *, wake_up: bool | None = None) -> list[str]:
    """Bring the outbox's tables up to date. It is safe to run twice, or by two at once.

    An existing outbox table, such as goharvest's, keeps its columns. With at-least-once delivery, the table gets a
    fillfactor if it has none, so that its pages leave room for marked rows. Staging tables of Spark jobs that are gone
    are removed, and the schema for such tables is created if the role may do that.

    Args:
        settings: name the outbox.
        wake_up: True installs the trigger by which writers wake sleeping harvesters, for as many shards as the outbox
            has, or the settings ask for if those are more. False removes it. None leaves it as it is.

    Returns:
        The names of the migrations that were applied now; empty if all had been applied before.

    Raises:
        ServerRefused: the database cannot be reached, or does not let us create tables; it has a table or function with
            the name of ours whose owner is not trusted; the outbox is a view of anything but one table; or somebody
            holds a lock for a minute.
        InvalidSetting: the table has been migrated under another name, or its name is that of another table of ours.
        SchemaMissing: the table lacks a column, or has one of another type: it is no outbox, and is left as it is.
        StoreUnavailable: Postgres went away meanwhile.
    """
    deadline, reported = time.monotonic() + PATIENCE_SECONDS, ""
    with command_connection(settings, is_patient=True) as connection:
        table = with_schema(connection, settings.table)
        while True:
            try:
                return _migrate(connection, settings, table, wake_up=wake_up)
            except psycopg.errors.LockNotAvailable:
                holder = _in_the_way(connection, settings, table)
            if time.monotonic() > deadline:
                raise ServerRefused(
                    f"Postgres: nothing was migrated: {holder} has held a lock on the outbox's tables for "
                    f"{PATIENCE_SECONDS:.0f} s; end it, or try again later"
                )
            if holder != reported:
                logger.warning("waiting for %s, which holds a lock on the outbox's tables", holder)
                reported = holder
            time.sleep(PAUSE_SECONDS)


def _in_the_way(connection: psycopg.Connection[tuple[Any, ...]], settings: Settings, table: str) -> str:
    schema, _, _ = table.rpartition(".")
    values = {"table": settings.table, "schema": schema, "names": _names(table)}
    found = connection.execute(statement("migrate", "in_the_way", table), values).fetchall()
    return str(found[0][0]) if found else "a session that has ended since"


def _names(table: str) -> list[str]:
    """The names of all tables of the outbox, without their schema."""
    return [table.rpartition(".")[2], *_companion_names()]


def _companion_names(pattern: str = "") -> list[str]:
    """The names of what migrations make beside the outbox, where they follow `pattern`, and `outbox_migration`."""
    return [*re.findall(pattern + r"\{(outbox_\w+)\}", "".join(migrations().values())), "outbox_migration"]


def _migrate(
    connection: psycopg.Connection[tuple[Any, ...]], settings: Settings, table: str, *, wake_up: bool | None
) -> list[str]:
    """Try once to migrate, in one transaction. The arguments are those of `migrate`.

    Raises:
        psycopg.errors.LockNotAvailable: somebody holds a lock; nothing was done.
    """
    with connection.transaction():

        def run(query: str, /, **values: object) -> list[str]:
            cursor = connection.execute(statement("migrate", query, table), {"table": settings.table, **values})
            return [row[0] for row in cursor.fetchall()] if cursor.description else []

        run("wait_a_little")
        run("lock")
        run("trust_nobody")
        run("create_ledger")
        known = migrations()
        refuse_strangers(connection, table)
        refuse_other_tables(connection, table, settings.table)
        run("forget_dropped_table")
        applied = set(run("applied"))
        pending = {name: text for name, text in known.items() if name not in applied}
        for name, text in pending.items():
            connection.execute(compose(text, table))
            run("record", name=name)
        if not run("notices_truncation"):
            connection.execute(notice_truncation(connection, table))
        check_name(settings.table, connection.execute(statement("identity", "known_as", table)).fetchall())
        run("identify")
        _wake_up(connection, settings, table, install=wake_up)  # Needs the registration: it reads the shards.
        refuse_strangers(connection, table)
        run("make_secret")
        if run("may_make_staging_schema"):
            run("make_staging_schema")
        if settings.delivery == "at-least-once" and run("may_make_room"):
            run("make_room")
        drop_orphans(connection, table)
    return list(pending)


def refuse_strangers(connection: psycopg.Connection[tuple[Any, ...]], table: str) -> None:
    """Check that no table or function with the name of ours could run code of somebody who is not trusted.

    Raises:
        ServerRefused: one could; the message names it and its owner.
    """
    found = connection.execute(statement("migrate", "strangers", table), strangers_of(table)).fetchall()
    if found:
        raise ServerRefused(
            f"Postgres: {found[0][0]}, who could have it run anything as you: drop it, or give it to another owner"
        )


def refuse_other_tables(connection: psycopg.Connection[tuple[Any, ...]], table: str, called: str) -> None:
    """Check that what is there by the outbox's name is an outbox: a migration would alter another table.

    Args:
        connection: to the outbox's database.
        table: the outbox's name with its schema.
        called: the name by which the user knows it.

    Raises:
        InvalidSetting: it is the name of one of the tables that an outbox has beside it.
        SchemaMissing: there is something else of that name.
    """
    if table.rpartition(".")[2] in _companion_names("CREATE TABLE[A-Z ]* "):
        raise InvalidSetting(f"OUTBOX_TABLE: expected a name that no other table of an outbox has (given: {called!r})")
    if connection.execute(statement("migrate", "exists", table)).fetchall():
        check_columns(connection, table, called)


def strangers_of(table: str) -> dict[str, object]:
    """The parameters of the statement `strangers`."""
    schema, _, _ = table.rpartition(".")
    return {"names": _names(table), "schema": schema}


def _wake_up(
    connection: psycopg.Connection[tuple[Any, ...]], settings: Settings, table: str, *, install: bool | None
) -> None:
    def ask(query: sql.Composed) -> psycopg.Cursor[tuple[Any, ...]]:
        return connection.execute(query, {"table": settings.table, "shards": settings.shards})

    if install is False:
        ask(drop_wake_up_trigger(connection, table))
        return
    # A trigger that stays gets this version's function, too.
    query = "shards" if install else "shards_of_trigger"
    for (shards,) in ask(statement("wake_up", query, table)).fetchall():
        ask(wake_up_function(table, shards))
        if install:
            ask(wake_up_trigger(connection, settings, table, shards))


@cache
def migrations() -> Mapping[str, str]:
    """Every migration's text by its name, in the order in which they apply."""
    folder = files("outbox_plugin.schema").joinpath("migrations")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return {name.removesuffix(".sql"): folder.joinpath(name).read_text(encoding="utf-8") for name in names}
