"""`Outbox`, which writes an application's events in the application's own transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Generator, Iterable
from types import TracebackType
from typing import Generic, Self, TypeVar, cast, overload

from outbox_plugin.emit.cloud_events import CloudEventsMode
from outbox_plugin.emit.drivers import AsyncConnection, Insert, SyncConnection, check, is_async, write, write_async
from outbox_plugin.emit.event import Event
from outbox_plugin.emit.row_encoder import MAX_RECORD_BYTES, Row, RowEncoder, Serializer, as_text
from outbox_plugin.errors import WrongConnection

C = TypeVar("C", bound=SyncConnection | AsyncConnection)


class Outbox:
    """Writes events to the outbox in the caller's transaction: they are published if and only if it commits.

    Every method takes a connection of psycopg (sync or async), a connection or session of SQLAlchemy 2 (sync or async),
    or Django's connection. If the connection is async, await the method's result.

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
        cloud_events_mode: CloudEventsMode = "binary",
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        """Make an outbox. It opens no connection.

        Args:
            table: the outbox table, optionally with its schema.
            serializer: makes an event's value: `as_text` (JSON), or one of `outbox_plugin.encoding`. Bytes that are no
                text go into `kafka_value` if that is BYTEA, and otherwise make the event a whole record.
            cloud_events: if given, events are CloudEvents 1.0. This is their source, a URI reference.
            cloud_events_mode: the attributes become headers (`binary`), or the value is a JSON object with the
                attributes and the data (`structured`).
            max_record_bytes: the largest record that Kafka accepts, in bytes, with key and headers. The default is
                librdkafka's `message.max.bytes`.
        """
        self._insert = Insert(table)
        self._encoder = RowEncoder(serializer, cloud_events, max_record_bytes, cloud_events_mode)

    @overload
    def emit(self, connection: AsyncConnection, event: Event) -> Awaitable[None]: ...
    @overload
    def emit(self, connection: SyncConnection, event: Event) -> None: ...
    def emit(self, connection: SyncConnection | AsyncConnection, event: Event) -> Awaitable[None] | None:
        """Write one event in `connection`'s transaction.

        Raises:
            InvalidEvent: Kafka or the table would refuse it; the exception names the field.
            WrongConnection: the connection has no transaction of the caller.
        """
        return self._write(connection, [self._encoder.row(event)])

    @overload
    def emit_many(self, connection: AsyncConnection, events: Iterable[Event]) -> Awaitable[None]: ...
    @overload
    def emit_many(self, connection: SyncConnection, events: Iterable[Event]) -> None: ...
    def emit_many(
        self, connection: SyncConnection | AsyncConnection, events: Iterable[Event]
    ) -> Awaitable[None] | None:
        """Write `events` in `connection`'s transaction, in their order.

        Of a generator's events, a thousand are in memory at a time, so it may yield millions. Until it is exhausted,
        only the generator itself may run statements on the connection. If an exception is raised, this call has
        written nothing; if the generator raised it, the transaction can go on.

        Raises:
            InvalidEvent: Kafka or the table would refuse an event.
            WrongConnection: the connection has no transaction of the caller, or the generator is reading from the same
                connection by `Cursor.stream`.
        """
        if isinstance(events, Collection):
            return self._write(connection, [self._encoder.row(event) for event in events])
        return self._write(connection, self._rows(events))

    def listener(self, connection: C) -> Listener[C]:
        """Collects the events of a unit of work, and writes them in `connection`'s transaction at its end.

        Use it with `with`, or with `async with` if the connection is async.

        Example:
            with connection.transaction(), outbox.listener(connection) as listener:
                order.place(listener)  # Which calls `listener.occurred(OrderPlaced(…))`.
        """
        return Listener(self, connection)

    def _check(self, connection: SyncConnection | AsyncConnection) -> None:
        """Raises WrongConnection if events emitted on it now would not belong to a transaction of the caller."""
        check(connection)

    def _rows(self, events: Iterable[Event]) -> Generator[Row]:
        """The events' rows, made one at a time. Closing this generator closes a generator of events, too."""
        try:
            for event in events:
                yield self._encoder.row(event)
        finally:
            if isinstance(events, Generator):
                events.close()

    def _write(self, connection: SyncConnection | AsyncConnection, rows: Iterable[Row]) -> Awaitable[None] | None:
        if is_async(connection):
            return write_async(connection, self._insert, rows)
        write(connection, self._insert, rows)
        return None


class Listener(Generic[C]):
    """The events of a unit of work. They are written when the unit ends without an exception, and dropped otherwise.

    Events are written at the end of the unit, so rolling back a savepoint within the unit does not drop them. If a part
    of the work may be rolled back alone, give it its own listener, inside its savepoint.
    """

    def __init__(self, outbox: Outbox, connection: C) -> None:
        self._outbox = outbox
        self._connection = connection
        self._rows: list[Row] = []

    def occurred(self, event: Event) -> None:
        """Collect an event, to be written at the end of the unit of work.

        Raises:
            InvalidEvent: Kafka or the table would refuse it; the exception names the field.
        """
        self._rows.append(self._outbox._encoder.row(event))

    def __enter__(self) -> Self:
        if is_async(self._connection):
            raise WrongConnection("the connection is async: use `async with outbox.listener(…)`")
        return self._entered()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rows, self._rows = self._rows, []
        if rows and error is None:
            self._outbox._write(self._connection, rows)

    async def __aenter__(self) -> Self:
        if not is_async(self._connection):
            raise WrongConnection("the connection is not async: use `with outbox.listener(…)`")
        return self._entered()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rows, self._rows = self._rows, []
        if rows and error is None:
            await cast("Awaitable[None]", self._outbox._write(self._connection, rows))

    def _entered(self) -> Self:
        self._outbox._check(self._connection)  # Now, so that a wrong connection is refused before the work is done.
        self._rows = []
        return self
