"""The SQL that `outbox migrate` would run to bring an outbox's tables up to date, for a DBA who runs it by hand.

The present state is read in a read-only transaction, so nothing is changed and no table is locked. The SQL is one
transaction: if somebody migrates after it was printed, it fails as a whole and changes nothing. It does not remove the
staging tables of Spark jobs that are gone, because such a job may run again before the SQL does: the next job removes
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.printable import printable
from outbox_plugin.schema.connection import command_connection
from outbox_plugin.schema.migrate import migrations, refuse_other_tables, refuse_strangers, strangers_of
from outbox_plugin.schema.statements import check_name, compose, statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.schema.triggers import drop_wake_up_trigger, notice_truncation, wake_up_function, wake_up_trigger
from outbox_plugin.settings import Settings

_NOT_THERE_YET = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn)


def migration_sql(settings: Settings, *, wake_up: bool | None = None) -> str:
    """The SQL that `migrate` would run now for these arguments; a comment if all is up to date. Changes nothing.

    Raises:
        ServerRefused: the database cannot be reached, or has a table or function with the name of ours whose owner is
            not trusted; or the outbox is a view of anything but one table.
        InvalidSetting: the table has been migrated under another name, or its name is that of another table of ours.
        SchemaMissing: the table lacks a column, or has one of another type: it is no outbox.
        StoreUnavailable: Postgres went away meanwhile.
    """
    with command_connection(settings, is_patient=True) as connection, connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        table = with_schema(connection, settings.table)
        connection.execute(statement("migrate", "trust_nobody", table))
        refuse_strangers(connection, table)
        refuse_other_tables(connection, table, settings.table)
        written = list(_Script(connection, settings, table).lines(wake_up))
    if not written:
        return f"-- {settings.table} is up to date"
    return "\n\n".join(written)


class _Script:
    """Writes the statements, in the order in which `migrate` runs them."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]], settings: Settings, table: str) -> None:
        self._connection = connection
        self._cursor = psycopg.ClientCursor(connection)
        self._settings = settings
        self._table = table
        self._values = {"table": settings.table}

    def lines(self, wake_up: bool | None) -> Iterator[str]:
        """Comments and statements; none if there is nothing to do."""
        there = bool(self._ask("migrate", "exists"))
        applied = {row[0] for row in self._ask("migrate", "applied")} if there else set()
        check_name(self._settings.table, self._ask("identity", "known_as"))
        pending = {name: text for name, text in migrations().items() if name not in applied}
        rest = [
            *([] if self._ask("migrate", "notices_truncation") else [self._notice_truncation()]),
            *self._wake_up(wake_up),
            *([] if self._ask("migrate", "is_identified") else [self._write("migrate", "identify")]),
            *([] if self._ask("migrate", "has_secret") else [self._write("migrate", "make_secret")]),
            *self._make_room(there=there),
        ]
        if not pending and not rest and not self._ask("migrate", "may_make_staging_schema"):
            return
        yield f"-- Migrates {self._place()}: {', '.join(pending) or 'no migration is pending'}."
        yield "BEGIN;"
        for name in ("wait_a_little", "lock", "trust_nobody", "create_ledger"):
            yield self._write("migrate", name)
        yield self._refuse_strangers()
        yield self._write("migrate", "forget_dropped_table")
        for name, text in pending.items():
            yield f"-- {name}\n{_ended(compose(text, self._table).as_string(self._connection).strip())}"
            yield self._with_values(statement("migrate", "record", self._table), name=name)
        yield from rest
        if not self._ask("migrate", "has_staging_schema"):
            yield self._make_staging_schema()
        yield self._refuse_strangers()
        yield "COMMIT;"

    def _place(self) -> str:
        [(database,)] = self._connection.execute("SELECT pg_catalog.current_database()").fetchall()
        return printable(f"{self._settings.table} in the database {database}")

    def _notice_truncation(self) -> str:
        return self._with_values(notice_truncation(self._connection, self._table))

    def _wake_up(self, install: bool | None) -> list[str]:
        """Install or remove the trigger, as `migrate` does. With None, update the function of an existing trigger."""
        if install is False:
            installed = self._ask("wake_up", "shards_of_trigger")
            return [self._with_values(drop_wake_up_trigger(self._connection, self._table))] if installed else []
        found = self._ask("wake_up", "shards" if install else "shards_of_trigger")
        if install and not found:
            found = [(self._settings.shards,)]
        written = []
        for (shards,) in found:
            written.append(self._with_values(wake_up_function(self._table, shards)))
            if install:
                written.append(
                    self._with_values(wake_up_trigger(self._connection, self._settings, self._table, shards))
                )
        return written

    def _make_room(self, *, there: bool) -> list[str]:
        if self._settings.delivery != "at-least-once" or (there and not self._ask("migrate", "may_make_room")):
            return []
        return [self._write("migrate", "make_room")]

    def _make_staging_schema(self) -> str:
        """A block that creates the schema if the role that runs it may. Spark's jobs can do without the schema."""
        allowed = self._cursor.mogrify(statement("migrate", "may_make_staging_schema", self._table))
        make = self._cursor.mogrify(statement("migrate", "make_staging_schema", self._table))
        return self._block(f"BEGIN\nIF EXISTS (\n{allowed}\n) THEN\n{make};\nEND IF;\nEND")

    def _refuse_strangers(self) -> str:
        """A block that aborts the script if a table or function with the name of ours belongs to a stranger."""
        found = self._cursor.mogrify(statement("migrate", "strangers", self._table), strangers_of(self._table))
        return self._block(
            "DECLARE stranger pg_catalog.text;\nBEGIN\n"
            f"FOR stranger IN\n{found}\nLOOP RAISE EXCEPTION '%', stranger; END LOOP;\nEND"
        )

    def _block(self, body: str) -> str:
        return sql.SQL("DO {};").format(sql.Literal(body)).as_string(self._connection)

    def _ask(self, noun: str, name: str) -> list[tuple[Any, ...]]:
        """The rows that a query returns; none if a table or column of ours does not exist yet."""
        values = {**self._values, "shards": self._settings.shards}
        try:
            with self._connection.transaction():
                return self._connection.execute(statement(noun, name, self._table), values).fetchall()
        except _NOT_THERE_YET:
            return []

    def _write(self, noun: str, name: str) -> str:
        return self._with_values(statement(noun, name, self._table))

    def _with_values(self, query: sql.Composed, **values: object) -> str:
        return _ended(self._cursor.mogrify(query, {**self._values, **values}))


def _ended(text: str) -> str:
    """`text` with a semicolon at its end, on a new line if the text ends with a comment."""
    return text if text.endswith(";") else f"{text};" if not text.splitlines()[-1].startswith("--") else f"{text}\n;"
