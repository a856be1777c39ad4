"""Django's models in an inbox's handlers, in the transaction of the event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import psycopg
from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, NotSupportedError, connections, transaction
from psycopg.adapt import AdaptersMap
from psycopg.rows import TupleRow, tuple_row

from outbox_plugin.inbox.borrowed_connection import BorrowedConnection


@contextmanager
def database_of(connection: psycopg.Connection[Any], alias: str = DEFAULT_DB_ALIAS) -> Iterator[None]:
    """Have Django's models read and write in the transaction of an inbox's handler.

    It is a `transaction.atomic()` block of a savepoint. What the models have written is committed with the event, or
    rolled back with it. An exception that leaves the block undoes what they have done in it. An error of the database
    that is caught within the block, and not around an `atomic()` of its own, fails the block at its end.

    Args:
        connection: the handler's.
        alias: of the database in Django's settings. It must be one of Postgres. While the block lasts, the models that
            use it work on the handler's connection, with the rights that this has.

    Raises:
        TypeError: the connection is async, or the alias is not one of Postgres. Django's models are not async.
        django.db.NotSupportedError: `transaction.on_commit` was called within the block.

    Example:
        def handle(connection: psycopg.Connection, event: Received) -> None:
            with database_of(connection):
                Order.objects.create(**event.json())
    """
    if not isinstance(connection, psycopg.Connection):
        raise TypeError(
            f"expected the connection of a handler that is not async (given: a {type(connection).__name__}): "
            "Django's models cannot use an async one"
        )
    own = connections[alias]
    if own.vendor != "postgresql":
        raise TypeError(f"expected a database of Postgres (the alias {alias!r} names one of {own.display_name})")
    database = own.copy()
    with connection.transaction(), _time_zone(connection, database.timezone_name):
        _lend(connection, database)
        connections[alias] = database
        try:
            with transaction.atomic(using=alias):
                yield
                database.validate_no_broken_transaction()
        finally:
            connections[alias] = own


class _DjangosConnection(BorrowedConnection):
    """A handler's connection that converts values, and makes cursors, as those of Django do."""

    autocommit = False

    def __init__(self, connection: psycopg.Connection[Any], options: dict[str, Any]) -> None:
        super().__init__(connection)
        self.adapters = AdaptersMap(options["context"])
        self.row_factory = tuple_row
        self._new_cursor: Callable[[object], psycopg.Cursor[TupleRow]] = options["cursor_factory"]

    def cursor(self, name: str = "", **options: bool) -> psycopg.Cursor[TupleRow] | psycopg.ServerCursor[TupleRow]:
        """Return a cursor; one with a name reads its rows from the server bit by bit."""
        if name:
            return psycopg.ServerCursor(self, name, **options)  # type: ignore[call-overload, no-any-return]
        return self._new_cursor(self)


def _lend(connection: psycopg.Connection[Any], database: Any) -> None:
    """Give a handler's connection to a database of Django that has none, as if it had connected."""
    database.settings_dict["OPTIONS"].pop("pool", None)  # It would take the connection for one of its pool's.
    database.connection = _DjangosConnection(connection, database.get_connection_params())
    database.autocommit = True
    database.on_commit = _refuse_on_commit
    if apps.is_installed("django.contrib.postgres"):
        from django.contrib.postgres.signals import register_type_handlers

        register_type_handlers(database)


def _refuse_on_commit(*_: object, **__: object) -> NoReturn:
    raise NotSupportedError(
        "transaction.on_commit does not work in an inbox's handler: the inbox commits once the handler has returned; "
        "emit an event in its place"
    )


@contextmanager
def _time_zone(connection: psycopg.Connection[Any], name: str | None) -> Iterator[None]:
    """Have Postgres send times in Django's time zone, as Django takes for granted."""
    former = connection.info.parameter_status("TimeZone")
    if not name or name == former:
        yield
        return
    _set_time_zone(connection, name)
    yield
    _set_time_zone(connection, former)  # After an exception, the end of the savepoint does it.


def _set_time_zone(connection: psycopg.Connection[Any], name: str | None) -> None:
    connection.execute("SELECT set_config('TimeZone', %s, true)", [name])
