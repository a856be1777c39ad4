"""A handler session: a connection, the handler that works on it, and the proof that it kept its transaction.

A handler can end its transaction by SQL that psycopg does not see: `COMMIT AND CHAIN`, `ROLLBACK; BEGIN`. The
connection is then in a transaction again, so its state proves nothing. The proof is the transaction's id, and what
Postgres says became of it. Asking after each event would cost a round trip, so a setting serves as a sign:
`application_name`, set for the transaction alone. When the transaction ends, Postgres sets it back, and tells the
client with the answer to the statement that ended it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from outbox_plugin.errors import RAISED_ROLLBACK, HandlerMisuse
from outbox_plugin.inbox.received import Received
from outbox_plugin.schema.connection import connect, connect_async
from outbox_plugin.schema.watched_connection import WatchedAsyncConnection, WatchedConnection
from outbox_plugin.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from psycopg.pq.abc import PGresult
    from psycopg.sql import SQL, Composed

Handler = Callable[[psycopg.Connection[Any], Received], None]
AsyncHandler = Callable[[psycopg.AsyncConnection[Any], Received], Awaitable[None]]
BatchHandler = Callable[[psycopg.Connection[Any], list[Received]], None]
AsyncBatchHandler = Callable[[psycopg.AsyncConnection[Any], list[Received]], Awaitable[None]]
Events = Received | list[Received]
Row = tuple[Any, ...]
T = TypeVar("T")
_AnyConnection = WatchedConnection[Any] | WatchedAsyncConnection[Any]
_WATCHED = (WatchedConnection, WatchedAsyncConnection)
_SIGN = b"application_name"
# As plain numbers, which libpq gives: they are compared after each event.
_ACTIVE, _IN_TRANSACTION = int(TransactionStatus.ACTIVE), int(TransactionStatus.INTRANS)
_NO_PIPELINE = int(PipelineStatus.OFF)
_MAX_NAME_CHARACTERS = 45  # Postgres cuts it off at 63 bytes; the rest is for a number.


class HandlerSession(Protocol):
    """The port of `handling`: a connection, and the handler that works on it."""

    @property
    def lost(self) -> bool:
        """Whether the connection is closed, or was never made."""
        ...

    async def connect(self) -> None:
        """Make a new connection if there is none, it does not work, or a handler may have changed it."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[None]:
        """Return a transaction: committed at its end, rolled back on an exception."""
        ...

    async def fetch(self, query: Composed | SQL, values: dict[str, object] | None = None) -> list[Row]:
        """Run a statement, and return its rows, if it has any."""
        ...

    async def handle(self, events: Events) -> None:
        """Run the handler with an event, or a list of events, as it takes them.

        Raises:
            HandlerMisuse: the handler raised psycopg.Rollback or a BaseException that is no Exception, or left a
                statement, a COPY or a pipeline unfinished on its connection.
        """
        ...

    async def rest(self, seconds: float) -> None:
        """Wait for so many seconds."""
        ...

    def distrust(self) -> None:
        """Have a new connection for the next transaction, because a handler may have changed the session."""
        ...

    @property
    def may_have_savepoints(self) -> bool:
        """Whether a handler may have made savepoints since the transaction began."""
        ...

    def new_sign(self) -> str:
        """Return a sign for the next transaction, which no other one of this connection has."""
        ...

    def shows(self, sign: str) -> bool:
        """Whether the connection is in the transaction that has this sign; False if that is not certain."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class _SessionState:
    """What sync and async sessions remember of their connection."""

    _connection: _AnyConnection | None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._number = 0
        self._trusted = True

    @property
    def lost(self) -> bool:
        """Whether the connection is closed, or was never made."""
        return self._connection is None or self._connection.closed

    def distrust(self) -> None:
        """Have a new connection for the next transaction, because a handler may have changed the session."""
        self._trusted = False

    @property
    def may_have_savepoints(self) -> bool:
        """Whether a handler may have made savepoints since the transaction began.

        A handler need not use our cursors: there are psycopg's own, pipelines and COPY. Whatever went past ours counts.
        """
        assert self._connection is not None  # noqa: S101
        return self._connection.requests != self._connection.noted_requests

    def new_sign(self) -> str:
        """Return a sign for the next transaction, which no other one of this connection has."""
        assert self._connection is not None  # noqa: S101
        shown = self._connection.pgconn.parameter_status(_SIGN) or b""
        self._number += 1
        self._connection.noted_requests = self._connection.requests
        return f"{shown.decode('ascii', 'replace')[:_MAX_NAME_CHARACTERS]} #{self._number}"

    def shows(self, sign: str) -> bool:
        """Whether the connection is certainly still in the transaction that has this sign.

        Asks libpq directly, because this runs after each event.
        """
        if self._connection is None:
            return False
        pgconn = self._connection.pgconn
        in_transaction = pgconn.transaction_status == _IN_TRANSACTION
        return in_transaction and pgconn.parameter_status(_SIGN) == sign.encode()  # Of ASCII alone.

    def _is_as_we_left_it(self, connection: _AnyConnection) -> bool:
        is_idle = connection.pgconn.transaction_status == TransactionStatus.IDLE and not _in_pipeline(connection)
        return self._trusted and connection.autocommit and is_idle


class ThreadSession(_SessionState):
    """The session of one thread, for a sync handler."""

    def __init__(self, settings: Settings, handler: Callable[[Any, Any], None]) -> None:
        super().__init__(settings)
        self._handler = handler
        self._connection: WatchedConnection[Any] | None = None

    async def connect(self) -> None:
        """Make a new connection if there is none, it does not work, or a handler may have changed it."""
        if self._connection is not None and not self._is_as_we_left_it(self._connection):
            self._connection.close()
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._settings, purpose="outbox inbox")
            self._connection.cursor_factory = self._connection.emit_cursor = _NotingCursor
            self._trusted = True

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Return a transaction: committed at its end, rolled back on an exception."""
        await self.connect()
        assert self._connection is not None  # noqa: S101 - mypy cannot know.
        with self._connection.transaction():
            yield

    async def fetch(self, query: Composed | SQL, values: dict[str, object] | None = None) -> list[Row]:
        """Run a statement, and return its rows, if it has any."""
        assert self._connection is not None  # noqa: S101 - `connect` comes first.
        cursor = _NotingCursor(self._connection, row_factory=tuple_row).execute(query, values)
        return cursor.fetchall() if cursor.description else []

    async def handle(self, events: Events) -> None:
        """Run the handler with an event or a list of events; raises HandlerMisuse if it breaks the rules."""
        assert self._connection is not None  # noqa: S101
        try:
            self._handler(self._connection, events)
        except psycopg.Rollback as error:  # psycopg would end the transaction, and raise nothing.
            raise HandlerMisuse(RAISED_ROLLBACK) from error
        except Exception:
            raise
        except BaseException as error:  # SystemExit and the like must not end this thread.
            raise HandlerMisuse(f"the handler let {type(error).__name__} out") from error
        if _is_busy(self._connection):
            self._connection.close()
            raise HandlerMisuse(_LEFT_BUSY)

    async def rest(self, seconds: float) -> None:
        """Wait for so many seconds."""
        time.sleep(seconds)

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()


class TaskSession(_SessionState):
    """The session of one asyncio task, for an async handler."""

    def __init__(self, settings: Settings, handler: Callable[[Any, Any], Awaitable[None]]) -> None:
        super().__init__(settings)
        self._handler = handler
        self._connection: WatchedAsyncConnection[Any] | None = None

    async def connect(self) -> None:
        """Make a new connection if there is none, it does not work, or a handler may have changed it."""
        if self._connection is not None and not self._is_as_we_left_it(self._connection):
            await self._connection.close()
        if self._connection is None or self._connection.closed:
            self._connection = await connect_async(self._settings, purpose="outbox inbox")
            self._connection.cursor_factory = self._connection.emit_cursor = _NotingAsyncCursor
            self._trusted = True

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Return a transaction: committed at its end, rolled back on an exception."""
        await self.connect()
        assert self._connection is not None  # noqa: S101
        async with self._connection.transaction():
            yield

    async def fetch(self, query: Composed | SQL, values: dict[str, object] | None = None) -> list[Row]:
        """Run a statement, and return its rows, if it has any."""
        assert self._connection is not None  # noqa: S101
        cursor = _NotingAsyncCursor(self._connection, row_factory=tuple_row)
        await cursor.execute(query, values)
        return await cursor.fetchall() if cursor.description else []

    async def handle(self, events: Events) -> None:
        """Run the handler with an event or a list of events; raises HandlerMisuse if it breaks the rules."""
        assert self._connection is not None  # noqa: S101
        try:
            await self._handler(self._connection, events)
        except psycopg.Rollback as error:
            raise HandlerMisuse(RAISED_ROLLBACK) from error
        except (Exception, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # This task itself is cancelled.
            raise HandlerMisuse(f"the handler let {type(error).__name__} out") from error
        if _is_busy(self._connection):
            await self._connection.close()
            raise HandlerMisuse(_LEFT_BUSY)

    async def rest(self, seconds: float) -> None:
        """Wait for so many seconds."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.close()


# One class for all sessions: Python optimises psycopg's code for the class that it sees, and classes of sessions would
# take turns.
class _NotingCursor(psycopg.Cursor[Any]):
    """A cursor that notes which requests have made no savepoint."""

    def execute(self, *arguments: Any, **named: Any) -> Self:
        super().execute(*arguments, **named)
        _note(self.connection, self._results)
        return self


class _NotingAsyncCursor(psycopg.AsyncCursor[Any]):
    """The same for asyncio."""

    async def execute(self, *arguments: Any, **named: Any) -> Self:
        await super().execute(*arguments, **named)
        _note(self.connection, self._results)
        return self


def _note(connection: object, results: Sequence[PGresult]) -> None:
    """Note a request whose results are known, as they are not in a pipeline, and of which none is a savepoint."""
    if not results or not isinstance(connection, _WATCHED):  # A handler may give another connection our class.
        return
    for result in results:
        if result.command_status == b"SAVEPOINT":
            return
    connection.noted_requests += 1


class Begun(NamedTuple):
    """A transaction that was begun for events.

    Attributes:
        id: its id in Postgres.
        sign: the value of `application_name` while it lasts.
    """

    id: str
    sign: str


class HandlerEndedTransaction(HandlerMisuse):
    """The handler committed the transaction that it was given."""


_LEFT_BUSY = "the handler left a statement, a COPY or a pipeline unfinished on its connection"


def _is_busy(connection: _AnyConnection) -> bool:
    return connection.pgconn.transaction_status == _ACTIVE or _in_pipeline(connection)


def _in_pipeline(connection: _AnyConnection) -> bool:
    return connection.pgconn.pipeline_status != _NO_PIPELINE


def driven(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, without an event loop, and return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a coroutine suspended that must run to its end at once")
