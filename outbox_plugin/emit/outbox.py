"""The write side: emit events in the caller's own transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from types import TracebackType
from typing import Generic, Self, TypeVar, cast, overload

from outbox_plugin.emit.drivers import AsyncConnection, Insert, SyncConnection, check, is_async, write, write_async
from outbox_plugin.emit.encoding import MAX_RECORD_BYTES, Encoding, Row, Serializer, as_text
from outbox_plugin.emit.event import Event
from outbox_plugin.errors import WrongConnection

C = TypeVar("C", bound=SyncConnection | AsyncConnection)


class Outbox:
    """Writes events to the outbox in the caller's transaction: they leave if it commits, and only then.

    Every method takes a connection of psycopg (sync or async), a connection or session of SQLAlchemy 2 (sync or async),
    or Django's connection; where that is async, what it returns is to be awaited.

    Example:
        outbox = Outbox()
        with psycopg.connect(dsn) as connection:
            connection.execute("UPDATE account SET …")
            outbox.emit(connection, Event(topic="accounts", key="17", type="Debited", value={"by": 5}))
    """

    def __init__(
        self,
        table: str = "outbox",
        *,
        serializer: Serializer = as_text,
        cloud_events: str | None = None,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        """Nothing is connected.

        Args:
            table: the outbox table, optionally with its schema.
            serializer: what stands in `kafka_value` for an event: `as_text` (JSON), or one of `outbox_plugin.encoding`
                for a table whose values are BYTEA.
            cloud_events: the source of CloudEvents 1.0, a URI reference; their attributes are headers then (Kafka's
                binary mode). None: no CloudEvents.
            max_record_bytes: what Kafka takes as a record, key and headers included.
        """
        self._insert = Insert(table)
        self._encoding = Encoding(serializer, cloud_events, max_record_bytes)

    @overload
    def emit(self, connection: AsyncConnection, event: Event) -> Awaitable[None]: ...
    @overload
    def emit(self, connection: SyncConnection, event: Event) -> None: ...
    def emit(self, connection: SyncConnection | AsyncConnection, event: Event) -> Awaitable[None] | None:
        """Write one event in `connection`'s transaction.

        Raises:
            InvalidEvent: Kafka or the table would refuse it; the exception names the field.
            WrongConnection: the connection has no transaction of the caller's.
        """
        return self._write(connection, [self._encoding.row(event)])

    @overload
    def emit_many(self, connection: AsyncConnection, events: Iterable[Event]) -> Awaitable[None]: ...
    @overload
    def emit_many(self, connection: SyncConnection, events: Iterable[Event]) -> None: ...
    def emit_many(
        self, connection: SyncConnection | AsyncConnection, events: Iterable[Event]
    ) -> Awaitable[None] | None:
        """Write `events` in `connection`'s transaction, in their order.

        Raises:
            InvalidEvent: see `emit`; nothing of this call is written.
            WrongConnection: see `emit`.
        """
        return self._write(connection, [self._encoding.row(event) for event in events])

    def listener(self, connection: C) -> Listener[C]:
        """Collects the events of a unit of work, and writes them in `connection`'s transaction at its end.

        To be used with `with`, or `async with` where the connection is async.

        Example:
            with connection.transaction(), outbox.listener(connection) as listener:
                order.place(listener)  # Which calls `listener.occurred(OrderPlaced(…))`.
        """
        return Listener(self, connection)

    def _write(self, connection: SyncConnection | AsyncConnection, rows: list[Row]) -> Awaitable[None] | None:
        if is_async(connection):
            return write_async(connection, self._insert, rows) if rows else _nothing()
        if rows:
            write(connection, self._insert, rows)
        return None


async def _nothing() -> None:
    """Nothing is to be written."""


class Listener(Generic[C]):
    """The events of a unit of work. They are written when it ends well; an exception forgets them.

    They are written where the unit ends: inside a savepoint, they are undone with it. So a part of the work that may be
    undone by itself has a listener of its own, inside its savepoint.
    """

    def __init__(self, outbox: Outbox, connection: C) -> None:
        self._outbox = outbox
        self._connection = connection
        self._rows: list[Row] = []

    def occurred(self, event: Event) -> None:
        """An event has occurred.

        Raises:
            InvalidEvent: see `Outbox.emit`.
        """
        self._rows.append(self._outbox._encoding.row(event))

    def __enter__(self) -> Self:
        if is_async(self._connection):
            raise WrongConnection("the connection is async: use `async with outbox.listener(…)`")
        return self._entered()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rows, self._rows = self._rows, []
        if error is None:
            self._outbox._write(self._connection, rows)

    async def __aenter__(self) -> Self:
        if not is_async(self._connection):
            raise WrongConnection("the connection is not async: use `with outbox.listener(…)`")
        return self._entered()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rows, self._rows = self._rows, []
        if error is None:
            await cast("Awaitable[None]", self._outbox._write(self._connection, rows))

    def _entered(self) -> Self:
        check(self._connection)  # Now, and not when the work is done.
        self._rows = []
        return self
