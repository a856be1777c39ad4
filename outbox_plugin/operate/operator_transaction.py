"""The transactions of an operator's commands. Sleeping harvesters are notified once a command is committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg

from outbox_plugin.errors import StoreUnavailable, UserError
from outbox_plugin.printable import one_line
from outbox_plugin.schema.connection import command_connection, is_connection_lost, went_away
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.schema.whole_records import takes_whole_records, whole_record_parts
from outbox_plugin.settings import Settings

# What Postgres says to an INSERT into a view whose columns are expressions, or that is of no single table.
_TAKES_NO_ROWS = (psycopg.errors.FeatureNotSupported, psycopg.errors.ObjectNotInPrerequisiteState)


class OperatorTransaction:
    """Runs the statements of one command."""

    def __init__(self, settings: Settings, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._table = settings.table
        self._table_with_schema = with_schema(connection, settings.table)
        self._connection = connection
        has_columns = takes_whole_records(connection, self._table_with_schema)
        self._parts = whole_record_parts(self._table_with_schema, has_columns=has_columns)

    def run(self, noun: str, name: str, **values: object) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run a statement.

        Args:
            noun: names the file, `queries/<noun>.sql`.
            name: of the statement in it.
            values: of the statement's parameters, besides the outbox's name.
        """
        query = statement(noun, name, self._table_with_schema, **self._parts)
        return self._connection.execute(query, {"table": self._table, **values})

    @contextmanager
    def emission(self) -> Iterator[None]:
        """A part of the transaction that inserts into the outbox. Raises UserError if that takes no rows."""
        try:
            yield
        except _TAKES_NO_ROWS as error:
            raise UserError(
                f"{self._table!r} takes no rows ({one_line(error)}): if it is a view, insert the events into the table "
                "that it is a view of; nothing was changed"
            ) from None

    def savepoint(self) -> AbstractContextManager[psycopg.Transaction]:
        """A part of the transaction that is undone alone if it raises."""
        return self._connection.transaction()


@contextmanager
def operator_transaction(settings: Settings) -> Iterator[OperatorTransaction]:
    """A transaction after which harvesters are not notified.

    Raises:
        UserError: the settings name several outboxes, and a command concerns one.
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, the message says that nobody knows
            whether it was done.
    """
    if settings.outboxes:
        raise UserError(
            f"OUTBOX_OUTBOXES names {len(settings.outboxes)} outboxes, and this concerns one of them: take one of "
            "Settings().each(), or use `outbox` with --outbox; nothing was changed"
        )
    with (
        command_connection(settings, purpose="outbox (order)", role="operator") as connection,
        _transaction(connection),
    ):
        yield OperatorTransaction(settings, connection)


@contextmanager
def _transaction(connection: psycopg.Connection[Any]) -> Iterator[None]:
    is_at_commit = False
    try:
        with connection.transaction():
            yield
            is_at_commit = True
    except psycopg.Error as error:
        if not is_at_commit or not is_connection_lost(error):
            raise
        raise StoreUnavailable(
            f"{went_away(error)}. It may have been done, or not: look at `outbox status` before you do it again"
        ) from None


@contextmanager
def notifying_transaction(settings: Settings) -> Iterator[OperatorTransaction]:
    """A transaction after whose commit sleeping harvesters are notified.

    Raises:
        UserError: the settings name several outboxes, and a command concerns one.
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, the message says that nobody knows
            whether it was done.
    """
    with operator_transaction(settings) as transaction:
        yield transaction
        transaction.run("control", "notify")
