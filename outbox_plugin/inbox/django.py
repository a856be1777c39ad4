"""Django's models in an inbox's handlers, in the transaction of the event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Lock
from typing import Any, NoReturn

import psycopg
from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, NotSupportedError, connections, transaction
from psycopg.adapt import AdaptersMap
from psycopg.rows import tuple_row

from outbox_plugin.errors import RAISED_ROLLBACK, HandlerMisuse
from outbox_plugin.inbox.borrowed_connection import BorrowedConnection

_blocks = count(1)
_NAMES_OF_A_BLOCK = 1_000_000
_UTC = {"UTC", "Etc/UTC"}  # Most servers are set to the second name, and Django to the first.


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
        django.db.NotSupportedError: `transaction.on_commit` was called within the block, or models were used while the
            connection was in a pipeline.
        HandlerMisuse: `psycopg.Rollback` left the block. psycopg would undo it, and the event would count as handled.

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
    original = connections[alias]
    if original.vendor != "postgresql":
        raise TypeError(f"expected a database of Postgres (the alias {alias!r} names one of {original.display_name})")
    savepoint, time_zone = _savepoint(connection), _time_zone(connection, original.timezone_name)
    with savepoint, time_zone, _replaced(connection, original) as database, transaction.atomic(using=alias):
        yield
        database.validate_no_broken_transaction()


class _DjangosConnection(BorrowedConnection):
    """A handler's connection that converts values, and makes cursors, as those of Django do."""

    def __init__(self, connection: psycopg.Connection[Any], options: dict[str, Any]) -> None:
        super().__init__(connection)
        self.autocommit = False
        self.adapters = AdaptersMap(options["context"])
        self.row_factory = tuple_row
        self.cursor_factory = options["cursor_factory"]
        self.server_cursor_factory = psycopg.ServerCursor

    @property  # type: ignore[misc]
    def __class__(self) -> type[psycopg.Connection[Any]]:  # type: ignore[override]
        """What `isinstance` is told: psycopg looks up types, as GeoDjango asks it to, on a connection alone."""
        return psycopg.Connection

    def cursor(self, *arguments: Any, **named: Any) -> psycopg.Cursor[Any]:
        """Return a cursor of Django's, as psycopg's own method would make it.

        Raises:
            psycopg.NotSupportedError: the connection is in a pipeline, where Django takes -1 for a number of rows.
        """
        if self.pgconn.pipeline_status:
            raise psycopg.NotSupportedError("Django's models do not work in a pipeline: end it first")
        made: psycopg.Cursor[Any] = psycopg.Connection.cursor(self, *arguments, **named)  # type: ignore[call-overload]
        return made

    def commit(self) -> NoReturn:
        """Refuse a COMMIT that Django has not been asked for. Its own does nothing."""
        raise psycopg.ProgrammingError("the inbox commits once the handler has returned")

    def rollback(self) -> NoReturn:
        """Refuse a ROLLBACK, too: if it did nothing, what it should undo would be committed."""
        raise psycopg.ProgrammingError("the inbox rolls back if the handler fails: raise an exception")

    def end(self) -> None:
        """Refuse what cursors that somebody has kept ask for. Their end, whenever that is, asks the server nothing."""
        self.closed = True
        self.lock = Lock()  # The end of a cursor waits for it, even if this thread has the connection's own.
        self.wait = _refuse_to_wait


def _refuse_to_wait(*_: object, **__: object) -> NoReturn:
    raise psycopg.InterfaceError("the block of database_of that this cursor belongs to has ended")


class _Driver:
    """What a database of Django uses in place of psycopg: it "connects" by taking the handler's connection."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(psycopg, name)

    def connect(self, **options: Any) -> _DjangosConnection:
        return _DjangosConnection(self._connection, options)


@contextmanager
def _replaced(connection: psycopg.Connection[Any], original: Any) -> Iterator[Any]:
    """Replace Django's database, `original`, by one on a handler's connection."""
    database = _database_on(connection, original)
    connections[original.alias] = database
    borrowed = database.connection
    try:
        if apps.is_installed("django.contrib.postgres"):
            from django.contrib.postgres.signals import register_type_handlers

            register_type_handlers(database)  # It may look the types up, on the connection of the alias.
        yield database
    finally:
        connections[original.alias] = original
        borrowed.end()


def _database_on(connection: psycopg.Connection[Any], original: Any) -> Any:
    """Return a database like `original` that has connected, which gave it a handler's connection."""
    # With a pool in its options, it would take the connection for one of the pool's.
    options = {name: value for name, value in original.settings_dict["OPTIONS"].items() if name != "pool"}
    database = type(original)({**original.settings_dict, "OPTIONS": options}, original.alias)
    # Several blocks may share a transaction: each has names of its own for its savepoints and cursors.
    database.savepoint_state = database._named_cursor_idx = next(_blocks) * _NAMES_OF_A_BLOCK
    database.Database = _Driver(connection)
    database.connection = database.get_new_connection(database.get_connection_params())
    database.autocommit = True
    database._commit = database._rollback = _leave_to_the_savepoint
    database.on_commit = _refuse_on_commit
    return database


def _leave_to_the_savepoint() -> None:
    """Do nothing at the end of the outermost `atomic()`."""


def _refuse_on_commit(*_: object, **__: object) -> NoReturn:
    raise NotSupportedError(
        "transaction.on_commit does not work in an inbox's handler: the inbox commits once the handler has returned; "
        "emit an event in its place"
    )


@contextmanager
def _savepoint(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A savepoint that goes back on every exception, and lets each of them out."""
    with connection.transaction():
        try:
            yield
        except psycopg.Rollback as error:
            if error.transaction is not None:
                raise
            raise HandlerMisuse(RAISED_ROLLBACK) from error  # psycopg would undo the block, and go on after it.


@contextmanager
def _time_zone(connection: psycopg.Connection[Any], name: str | None) -> Iterator[None]:
    """Have Postgres send times in Django's time zone, as Django takes for granted."""
    former = connection.info.parameter_status("TimeZone")
    if not name or name == former or {name, former} == _UTC:
        yield
        return
    _set_time_zone(connection, name)
    yield
    _set_time_zone(connection, former)  # After an exception, the end of the savepoint does it.


def _set_time_zone(connection: psycopg.Connection[Any], name: str | None) -> None:
    connection.execute("SELECT set_config('TimeZone', %s, true)", [name])
