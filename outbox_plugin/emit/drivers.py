"""The connections that events can be emitted on, each in its own way, and always in the caller's transaction.

Nothing of SQLAlchemy or Django is imported: their connections are known by what they can do.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import Enum, auto
from inspect import iscoroutinefunction
from typing import Any, Protocol, cast

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.sql import SQL, Composed

from outbox_plugin.emit.encoding import Row
from outbox_plugin.errors import WrongConnection
from outbox_plugin.schema.statements import statement

ROWS_AT_A_TIME = 1_000


class SqlAlchemySync(Protocol):
    """A `Session`, a `scoped_session` or a `Connection` of SQLAlchemy 2."""

    def begin_nested(self) -> Any:
        """SQLAlchemy's own."""
        ...


class SqlAlchemyAsync(Protocol):
    """An `AsyncSession` or an `AsyncConnection` of SQLAlchemy 2."""

    def run_sync(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Awaitable[Any]:
        """SQLAlchemy's own."""
        ...


class Django(Protocol):
    """`django.db.connection`, or one of `django.db.connections`."""

    @property
    def in_atomic_block(self) -> Any:
        """Django's own."""
        ...

    def get_autocommit(self) -> bool:
        """Django's own."""
        ...


SyncConnection = psycopg.Connection[Any] | SqlAlchemySync | Django
AsyncConnection = psycopg.AsyncConnection[Any] | SqlAlchemyAsync


class Query:
    """A statement, as each driver wants it."""

    def __init__(self, query: Composed) -> None:
        self.text = re.sub("^--.*\n", "", query.as_string(None))
        self.bytes = self.text.encode()
        numbers = iter(range(1, 100))
        self.numbered = re.sub("%s", lambda _: f"${next(numbers)}", self.text)


class Insert:
    """The INSERTs of an outbox: of one row, and of many at once."""

    def __init__(self, table: str) -> None:
        self.one = Query(statement("emit", "insert_event", table))
        self._texts, self._bytes = (
            Query(statement("emit", "insert_events", table, value_type=SQL(f"pg_catalog.{each}")))
            for each in ("text", "bytea")
        )

    def statements(self, rows: Sequence[Row]) -> Iterator[tuple[Query, tuple[Any, ...]]]:
        """What to run, with what values, to write rows in their order."""
        if len(rows) == 1:
            yield self.one, rows[0]
            return
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            topics, keys, values, names, texts = zip(*rows[start : start + ROWS_AT_A_TIME], strict=True)
            query = self._texts
            if any(isinstance(value, bytes) for value in values):
                query, values = self._bytes, tuple(_hex(value) for value in values)
            headers = [_array([_array(each) for each in column]) for column in (names, texts)]
            yield query, (_array(topics), _array(keys), _array(values), *headers)


def _array(texts: Sequence[str | None]) -> str:
    """An array of texts as Postgres writes it."""
    if not texts:
        return "{}"
    if None in texts:
        return "{" + ",".join("NULL" if text is None else _quoted(text) for text in texts) + "}"
    # All at once: no text holds a NUL, so it can stand between them.
    together = "\0".join(cast(Sequence[str], texts)).replace("\\", "\\\\").replace('"', '\\"')
    return '{"' + together.replace("\0", '","') + '"}'


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _hex(value: str | bytes | None) -> str | None:
    """Bytes as Postgres writes them."""
    return "\\x" + value.hex() if isinstance(value, bytes) else value


class Kind(Enum):
    """What a connection is."""

    PSYCOPG = auto()
    PSYCOPG_ASYNC = auto()
    SQLALCHEMY = auto()
    SQLALCHEMY_ASYNC = auto()
    DJANGO = auto()


_kinds: dict[type, Kind] = {}  # Each attribute of Django's proxy costs microseconds.


def kind_of(connection: Any) -> Kind:
    """What `connection` is.

    Raises:
        WrongConnection: none that is known.
    """
    kind = _kinds.get(type(connection))
    if kind is None:
        kind = _kinds[type(connection)] = _found(connection)
    return kind


def _found(connection: Any) -> Kind:
    if isinstance(connection, psycopg.Connection):
        return Kind.PSYCOPG
    if isinstance(connection, psycopg.AsyncConnection):
        return Kind.PSYCOPG_ASYNC
    if hasattr(connection, "in_atomic_block"):
        return Kind.DJANGO
    if hasattr(connection, "run_sync"):
        return Kind.SQLALCHEMY_ASYNC
    if hasattr(connection, "begin_nested"):
        if iscoroutinefunction(getattr(connection, "connection", None)):
            raise WrongConnection("emit on the session that an async_scoped_session stands for: call it")
        return Kind.SQLALCHEMY
    raise WrongConnection(
        "expected a connection of psycopg or Django, or a connection or session of SQLAlchemy "
        f"(given: {type(connection).__module__}.{type(connection).__qualname__}); "
        "from any other, run SELECT outbox_emit(topic, key, value, headers)"
    )


def is_async(connection: SyncConnection | AsyncConnection) -> bool:
    """Whether writing on this connection is to be awaited."""
    return kind_of(connection) in (Kind.PSYCOPG_ASYNC, Kind.SQLALCHEMY_ASYNC)


def check(connection: Any) -> None:
    """Raises WrongConnection when events emitted on it now would not be part of a transaction of the caller's.

    Of SQLAlchemy's, that is known when they are written.
    """
    match kind_of(connection):
        case Kind.PSYCOPG | Kind.PSYCOPG_ASYNC:
            if connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE:
                raise WrongConnection(
                    "the connection is in autocommit mode: emit inside `with connection.transaction()`"
                )
        case Kind.DJANGO:
            if not connection.in_atomic_block and connection.get_autocommit():
                raise WrongConnection("Django commits each statement here: emit inside `with transaction.atomic()`")
        case _:
            pass


def write(connection: Any, insert: Insert, rows: Sequence[Row]) -> None:
    """Write rows, in their order, on a connection that is not async."""
    kind = kind_of(connection)
    if kind is Kind.SQLALCHEMY:
        _write_sqlalchemy(connection, insert, rows)
    elif kind is Kind.DJANGO:
        _write_django(connection, insert, rows)
    else:
        check(connection)
        cursor = psycopg.Cursor(connection)
        for query, values in insert.statements(rows):
            cursor.execute(query.bytes, values)


async def write_async(connection: Any, insert: Insert, rows: Sequence[Row]) -> None:
    """Write rows, in their order, on a connection that is async."""
    if kind_of(connection) is Kind.SQLALCHEMY_ASYNC:
        await connection.run_sync(_write_sqlalchemy, insert, rows)
        return
    check(connection)
    cursor = psycopg.AsyncCursor(connection)
    for query, values in insert.statements(rows):
        await cursor.execute(query.bytes, values)


def _write_django(connection: Any, insert: Insert, rows: Sequence[Row]) -> None:
    connection = getattr(connection.cursor, "__self__", connection)  # What the proxy stands for.
    if connection.vendor != "postgresql":
        raise WrongConnection(f"the outbox is in Postgres, and this connection is to {connection.vendor}")
    check(connection)
    with connection.cursor() as cursor:
        for query, values in insert.statements(rows):
            cursor.execute(query.text, values)


def _write_sqlalchemy(target: Any, insert: Insert, rows: Sequence[Row]) -> None:
    connection = target if hasattr(target, "exec_driver_sql") else target.connection()
    dialect = connection.dialect
    if dialect.name != "postgresql":
        raise WrongConnection(f"the outbox is in Postgres, and this connection is to {dialect.name}")
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        raise WrongConnection("the connection is in autocommit mode: emit on one that has a transaction")
    for query, values in insert.statements(rows):
        connection.exec_driver_sql(query.numbered if dialect.driver == "asyncpg" else query.text, values)
