"""Writes rows on each kind of connection, always in the caller's transaction.

SQLAlchemy is never imported, and Django only for a connection of Django's: connections are recognized by attributes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from inspect import iscoroutinefunction
from typing import Any, Protocol, cast

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Composed, Literal

from outbox_plugin.core.backlog import MIN_BACKLOG_IDS
from outbox_plugin.core.whole_record import WHOLE_RECORD_HEADER, text_of
from outbox_plugin.emit.row_encoder import Row
from outbox_plugin.errors import SchemaMissing, WrongConnection
from outbox_plugin.schema.statements import statement

ROWS_AT_A_TIME = 1_000
CHARACTERS_AT_A_TIME = 8_000_000  # Of values and headers in one statement, which is copied in memory several times.
MAX_ROWS_IN_SUMMARY = 1_000_000  # Takes Postgres about a second: well below any time-out of a statement.
_NOTHING = b"SELECT"
_AUTOCOMMIT = "the connection is in autocommit mode: emit inside `with connection.transaction()`"
_PLAIN_COLUMNS = 5
_VALUE = 2  # The place of a row's value.
# What the statements for many rows name, by the type of the values.
_VALUES: dict[type[str] | type[bytes] | None, dict[str, SQL]] = {
    str: {"value_type": SQL("pg_catalog.text"), "value": SQL("value")},
    bytes: {"value_type": SQL("pg_catalog.bytea"), "value": SQL("value")},
    None: {"value_type": SQL("pg_catalog.text"), "value": SQL("NULL")},
}


class SqlAlchemySync(Protocol):
    """A `Session`, a `scoped_session` or a `Connection` of SQLAlchemy 2."""

    def begin_nested(self) -> Any:
        """As SQLAlchemy defines it."""
        ...


class SqlAlchemyAsync(Protocol):
    """An `AsyncSession` or an `AsyncConnection` of SQLAlchemy 2."""

    def run_sync(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Awaitable[Any]:
        """As SQLAlchemy defines it.

        Args:
            fn: is called with the sync connection.
            args: and further arguments.
            named: by position or by name.
        """
        ...


class Django(Protocol):
    """`django.db.connection`, or one of `django.db.connections`."""

    @property
    def in_atomic_block(self) -> Any:
        """As Django defines it."""
        ...

    def get_autocommit(self) -> bool:
        """As Django defines it."""
        ...


SyncConnection = psycopg.Connection[Any] | SqlAlchemySync | Django
AsyncConnection = psycopg.AsyncConnection[Any] | SqlAlchemyAsync


class Query:
    """A statement in the forms that the drivers expect."""

    def __init__(self, query: Composed) -> None:
        self.text = re.sub("^--.*\n", "", query.as_string(None))
        self.bytes = self.text.encode()
        numbers = iter(range(1, 100))
        self.numbered = re.sub("%s", lambda _: f"${next(numbers)}", self.text)


class Question(Query):
    """A statement that returns one row, or none. In a pipeline, a driver learns that only when it fetches the row."""


Statement = tuple[Query, tuple[Any, ...]]  # A query and its parameters.
Statements = Generator[Statement, Any, None]  # Send it the row that each question returns; None for other statements.
Parts = Sequence[Sequence[Row]] | Iterator[Sequence[Row]]  # Each part is written by one statement.


class Insert:
    """The INSERT statements of an outbox: for one row, and for many at once."""

    def __init__(self, table: str) -> None:
        self._table = table
        self.one = Query(statement("emit", "insert_event", table))
        self._many = {
            values: Query(statement("emit", "insert_events", table, **parts)) for values, parts in _VALUES.items()
        }
        self._takes_whole_records = False  # As far as is known.
        self._values_are_bytes: bool | None = None  # Whether kafka_value is BYTEA; None: not known yet.

    def statements(self, parts: Parts) -> Statements:
        """The statements that write the parts. Of very many rows, the keys are summarised for the harvester as well."""
        rows = 0
        for part in parts:
            if any(isinstance(row[_VALUE], bytes) for row in part):
                if self._values_are_bytes is None:
                    answer = yield Question(statement("identity", "values_are_bytes", self._table)), ()
                    if answer is not None:  # Else there is no such table yet: the INSERT will say so.
                        [self._values_are_bytes] = answer
                if self._values_are_bytes is False:
                    part = [_with_whole_value(row) for row in part]
            if any(map(_is_whole, part)):
                yield from self._records(part)
            else:
                yield self.of(part)
            rows += len(part)
            if rows >= MAX_ROWS_IN_SUMMARY:
                yield from self._summarise(rows)
                rows = 0
        if rows >= MIN_BACKLOG_IDS:
            yield from self._summarise(rows)

    def _summarise(self, rows: int) -> Statements:
        """The statements that summarise the keys of the last rows, if the database role may do that."""
        if (yield Question(statement("emit", "may_summarise_keys", self._table)), ()):
            yield Query(statement("emit", "summarise_keys", self._table, written=Literal(rows))), ()

    def _records(self, rows: Sequence[Row]) -> Statements:
        """The statements that write rows of which some are whole records.

        Raises:
            SchemaMissing: the table lacks the columns; nothing has been written, and the transaction goes on.
        """
        if not self._takes_whole_records:
            [self._takes_whole_records] = yield Question(statement("identity", "takes_whole_records", self._table)), ()
            if not self._takes_whole_records:
                raise SchemaMissing(
                    f"the table {self._table!r} lacks the columns for an event's bytes that are no text, its partition "
                    "or its timestamp: run `outbox migrate`; a view must be made with them"
                )
        topics, keys, values, names, texts, *more = zip(*(_with_record(row) for row in rows), strict=True)
        query = statement("emit", "insert_records", self._table, **_VALUES[_type_of(values)])
        key_bytes, value_bytes, header_bytes, partitions, timestamps = more
        yield (
            Query(query),
            (
                _array(topics),
                _array(keys),
                _array(list(map(_hex, values))),
                *(_array([_array(each) for each in column]) for column in (names, texts)),
                _array(list(map(_hex, key_bytes))),
                _array(list(map(_hex, value_bytes))),
                _array([None if bodies is None else _array(list(map(_hex, bodies))) for bodies in header_bytes]),
                _array([None if number is None else str(number) for number in partitions]),
                _array([None if time is None else time.isoformat() for time in timestamps]),
            ),
        )

    def of(self, rows: Sequence[Row]) -> Statement:
        """The statement that writes the rows, of which there must be at least one, and none a whole record."""
        if len(rows) == 1:
            return self.one, rows[0]
        topics, keys, values, names, texts = zip(*rows, strict=True)
        type_ = _type_of(values)
        if type_ is bytes:
            values = tuple(map(_hex, values))
        headers = [_array([_array(each) for each in column]) for column in (names, texts)]
        return self._many[type_], (_array(topics), _array(keys), _array(values), *headers)


def _type_of(values: Sequence[str | bytes | None]) -> type[str] | type[bytes] | None:
    """The type of the values of one statement; None if all are tombstones, which a column of either type takes."""
    if any(isinstance(value, bytes) for value in values):
        return bytes
    return None if all(value is None for value in values) else str


def _is_whole(row: Row) -> bool:
    return len(row) > _PLAIN_COLUMNS


def _with_whole_value(row: Row) -> Row:
    """The row for a table whose values are TEXT: bytes that are no text become a whole record's value."""
    topic, key, value, names, texts, *more = row
    if not isinstance(value, bytes):
        return row
    if (text := text_of(value)) is not None:
        return cast("Row", (topic, key, text, names, texts, *more))
    if more:
        key_bytes, _, *others = more
        return cast("Row", (topic, key, None, names, texts, key_bytes, value, *others))
    bodies = [text if text is None else text.encode() for text in texts]
    return topic, key, None, [WHOLE_RECORD_HEADER, *names], [], None, value, bodies, None, None


def _with_record(row: Row) -> tuple[Any, ...]:
    """The columns of any row."""
    return row if _is_whole(row) else (*row, None, None, None, None, None)


def _array(texts: Sequence[str | None]) -> str:
    """A text array in Postgres's notation."""
    if not texts:
        return "{}"
    if None in texts:
        return "{" + ",".join("NULL" if text is None else _quoted(text) for text in texts) + "}"
    # Escapes all texts in one pass. No text contains a NUL, so NUL can separate them.
    together = "\0".join(cast(Sequence[str], texts)).replace("\\", "\\\\").replace('"', '\\"')
    return '{"' + together.replace("\0", '","') + '"}'


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _hex(value: str | bytes | None) -> str | None:
    """Bytes in Postgres's hexadecimal notation; text unchanged."""
    return "\\x" + value.hex() if isinstance(value, bytes) else value


class Kind(Enum):
    """The kinds of connections."""

    PSYCOPG = auto()
    PSYCOPG_ASYNC = auto()
    SQLALCHEMY = auto()
    SQLALCHEMY_ASYNC = auto()
    DJANGO = auto()


_kinds: dict[type, Kind] = {}  # A cache, because looking up an attribute of Django's proxy takes microseconds.


def kind_of(connection: Any) -> Kind:
    """The kind of `connection`.

    Raises:
        WrongConnection: events cannot be emitted on connections of its type.
    """
    kind = _kinds.get(type(connection))
    if kind is None:
        kind = _kinds[type(connection)] = _recognized(connection)
    return kind


def _recognized(connection: Any) -> Kind:
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
            raise WrongConnection("call the async_scoped_session, and emit on the session that it returns")
        return Kind.SQLALCHEMY
    raise WrongConnection(
        "expected a connection of psycopg or Django, or a connection or session of SQLAlchemy "
        f"(given: {type(connection).__module__}.{type(connection).__qualname__}); "
        "on any other, run SELECT outbox_emit(topic, key, value, headers)"
    )


def is_async(connection: SyncConnection | AsyncConnection) -> bool:
    """Whether writes on this connection must be awaited."""
    return kind_of(connection) in (Kind.PSYCOPG_ASYNC, Kind.SQLALCHEMY_ASYNC)


def check(connection: Any) -> None:
    """Raises WrongConnection if events emitted on it now would not belong to a transaction of the caller.

    SQLAlchemy's connections are checked when events are written.
    """
    match kind_of(connection):
        case Kind.PSYCOPG | Kind.PSYCOPG_ASYNC:
            if connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE:
                raise WrongConnection(_AUTOCOMMIT)
        case Kind.DJANGO:
            if not connection.in_atomic_block and connection.get_autocommit():
                raise WrongConnection("Django commits each statement here: emit inside `with transaction.atomic()`")
        case _:
            pass


def write(connection: Any, insert: Insert, rows: Iterable[Row]) -> None:
    """Write rows, in their order, on a connection that is not async.

    A sequence that fits into one statement is written by that statement. All other rows are written inside a savepoint:
    if a statement or the iterator `rows` fails, everything that was written is rolled back.

    Args:
        connection: as the application opened it.
        insert: the statement of the outbox.
        rows: to write.
    """
    kind = kind_of(connection)
    if kind is Kind.SQLALCHEMY:
        _write_sqlalchemy(connection, insert, rows)
    elif kind is Kind.DJANGO:
        _write_django(connection, insert, rows)
    else:
        _write_psycopg(connection, insert, rows)


async def write_async(connection: Any, insert: Insert, rows: Iterable[Row]) -> None:
    """Write rows on a connection that is async, as `write` does.

    Args:
        connection: as the application opened it.
        insert: the statement of the outbox.
        rows: to write.
    """
    if kind_of(connection) is Kind.SQLALCHEMY_ASYNC:
        await connection.run_sync(_write_sqlalchemy, insert, rows)
    else:
        await _write_psycopg_async(connection, insert, rows)


def _write_psycopg(connection: psycopg.Connection[Any], insert: Insert, rows: Iterable[Row]) -> None:
    parts = _parts_of(rows)
    if not parts:
        return
    check(connection)
    cursor = getattr(connection, "emit_cursor", psycopg.Cursor)(connection, row_factory=tuple_row)

    def execute(query: Query, values: tuple[Any, ...]) -> Any:
        _refuse_if_busy(connection, parts)
        if not isinstance(query, Question):
            cursor.execute(query.bytes, values)
            return None
        # On a cursor of its own, which no result of an earlier statement reaches late.
        return type(cursor)(connection, row_factory=tuple_row).execute(query.bytes, values).fetchone()

    if not _need_savepoint(parts):
        _run(insert.statements(parts), execute)
        return
    _refuse_if_busy(connection, parts)
    # This begins the caller's transaction. Else `transaction()` would begin one instead of a savepoint, and commit it.
    cursor.execute(_NOTHING)
    with connection.transaction() as savepoint:
        _refuse_if_new(savepoint)
        try:
            with _closing_if_it_fails(rows):
                _run(insert.statements(parts), execute)
        except BaseException:
            _refuse_if_busy(connection, parts)
            raise


async def _write_psycopg_async(connection: psycopg.AsyncConnection[Any], insert: Insert, rows: Iterable[Row]) -> None:
    parts = _parts_of(rows)
    if not parts:
        return
    check(connection)
    cursor = getattr(connection, "emit_cursor", psycopg.AsyncCursor)(connection, row_factory=tuple_row)
    if _need_savepoint(parts):
        await cursor.execute(_NOTHING)
    async with connection.transaction() if _need_savepoint(parts) else nullcontext() as savepoint:
        if savepoint is not None:
            _refuse_if_new(savepoint)
        with _closing_if_it_fails(rows):
            statements, answer = insert.statements(parts), None
            while (following := _next(statements, answer)) is not None:
                query, values = following
                if isinstance(query, Question):
                    asking = type(cursor)(connection, row_factory=tuple_row)
                    answer = await (await asking.execute(query.bytes, values)).fetchone()
                else:
                    await cursor.execute(query.bytes, values)
                    answer = None


def _refuse_if_new(savepoint: psycopg.Transaction | psycopg.AsyncTransaction) -> None:
    """Raises WrongConnection if this is a transaction, not a savepoint: it would be committed apart from the caller's.

    That is so in a pipeline in autocommit mode, whose statements seem to be in a transaction until they are sent.
    """
    if not savepoint.savepoint_name:
        raise WrongConnection(_AUTOCOMMIT)


def _refuse_if_busy(connection: psycopg.Connection[Any], parts: Parts) -> None:
    """Raises WrongConnection if the rows come from a stream on this connection: writing them would block for ever.

    With a sequence there is no such stream: if the connection is locked, another thread uses it and will release it.
    """
    if isinstance(parts, Iterator) and connection.lock.locked():
        connection.close()  # A rollback would block, too.
        raise WrongConnection(
            "Cursor.stream() is still reading rows on this connection, which can run no other statement meanwhile: use "
            "a server-side cursor, or another connection; nothing was written, and the connection is closed"
        )


def _write_django(connection: Any, insert: Insert, rows: Iterable[Row]) -> None:
    from django.db import transaction

    connection = getattr(connection.cursor, "__self__", connection)  # The connection behind the proxy.
    if connection.vendor != "postgresql":
        raise WrongConnection(f"the outbox is in Postgres, and this connection is to {connection.vendor}")
    parts = _parts_of(rows)
    if not parts:
        return
    check(connection)
    savepoint = transaction.atomic(using=connection.alias) if _need_savepoint(parts) else nullcontext()
    with connection.cursor() as cursor, savepoint, _closing_if_it_fails(rows):

        def execute(query: Query, values: tuple[Any, ...]) -> Any:
            cursor.execute(query.text, values)
            return cursor.fetchone() if isinstance(query, Question) else None

        _run(insert.statements(parts), execute)


def _write_sqlalchemy(target: Any, insert: Insert, rows: Iterable[Row]) -> None:
    connection = _connection_of(target)
    dialect = connection.dialect
    if dialect.name != "postgresql":
        raise WrongConnection(f"the outbox is in Postgres, and this connection is to {dialect.name}")
    if _commits_by_itself(connection):
        raise WrongConnection("the connection is in autocommit mode: emit on one that has a transaction")
    parts = _parts_of(rows)

    def execute(query: Query, values: tuple[Any, ...]) -> Any:
        result = connection.exec_driver_sql(query.numbered if dialect.driver == "asyncpg" else query.text, values)
        return result.first() if isinstance(query, Question) else None

    # The session makes the savepoint, so that it knows which of its objects are rolled back with it.
    with target.begin_nested() if _need_savepoint(parts) else nullcontext(), _closing_if_it_fails(rows):
        _connection_of(target)  # A session sends its savepoint only when it is asked for its connection.
        _run(insert.statements(parts), execute)


def _commits_by_itself(connection: Any) -> bool:
    """Whether SQLAlchemy's connection commits each statement.

    The execution options leave out the engine's isolation level. A connection of psycopg that is lent to SQLAlchemy may
    be in autocommit mode: it is accepted inside a transaction of its lender.
    """
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    pooled = connection.connection
    if not getattr(pooled.dbapi_connection, "autocommit", False):  # Some drivers have no such mode.
        return False
    pgconn = getattr(pooled.driver_connection, "pgconn", None)
    return pgconn is None or bool(pgconn.transaction_status == TransactionStatus.IDLE)


def _connection_of(target: Any) -> Any:
    """The connection of a session; a connection is returned unchanged."""
    return target if hasattr(target, "exec_driver_sql") else target.connection()


@contextmanager
def _closing_if_it_fails(rows: Iterable[Row]) -> Iterator[None]:
    """Close a generator of rows if the block fails, so that its own blocks end before the savepoint is rolled back."""
    try:
        yield
    except BaseException:
        if isinstance(rows, Generator):
            rows.close()
        raise


def _run(statements: Statements, execute: Callable[[Query, tuple[Any, ...]], Any]) -> None:
    answer = None
    while (following := _next(statements, answer)) is not None:
        answer = execute(*following)


def _next(statements: Statements, answer: Any) -> Statement | None:
    try:
        return statements.send(answer)
    except StopIteration:
        return None


def _parts_of(rows: Iterable[Row]) -> Parts:
    """The rows in parts of one statement each. An iterator stays lazy: its rows are fetched as they are written."""
    return list(_parts(rows)) if isinstance(rows, Sequence) else _parts(rows)


def _need_savepoint(parts: Parts) -> bool:
    return isinstance(parts, Iterator) or len(parts) > 1


def _parts(rows: Iterable[Row]) -> Iterator[Sequence[Row]]:
    part: list[Row] = []
    size = 0
    for row in rows:
        part.append(row)
        size += _characters(row)
        if len(part) == ROWS_AT_A_TIME or size >= CHARACTERS_AT_A_TIME:
            yield part
            part, size = [], 0
    if part:
        yield part


def _characters(row: Row) -> int:
    """How much a row has, about."""
    bodies: list[Any] = [row[2], *row[4]]
    for more in row[_PLAIN_COLUMNS:]:
        bodies += more if isinstance(more, list) else [more] if isinstance(more, bytes) else []
    return sum(len(body) for body in bodies if body is not None)
