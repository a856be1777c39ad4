"""An outbox for tests, which keeps events in a list."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any, cast
from unittest.mock import NonCallableMock

from outbox_plugin.emit.cloud_events import CloudEventsMode
from outbox_plugin.emit.drivers import AsyncConnection, SyncConnection, is_async
from outbox_plugin.emit.event import Event
from outbox_plugin.emit.outbox import Outbox
from outbox_plugin.emit.row_encoder import MAX_RECORD_BYTES, Row, RowEncoder, Serializer, as_text


class RecordingOutbox(Outbox):
    """An `Outbox` that writes nothing, and keeps the emitted events in `events`, in their order.

    It refuses what an `Outbox` refuses: an event that is wrong or too large, and a connection in autocommit mode. With
    an async connection, an event is kept once the result is awaited. It accepts the connections that an `Outbox`
    accepts, and mocks of them, such as `MagicMock(spec=psycopg.Connection)`. It does not notice a rollback: the events
    stay in the list.

    Attributes:
        events: the events that were emitted.

    Example:
        outbox = RecordingOutbox()
        place_order(MagicMock(spec=psycopg.Connection), outbox)
        assert [event.type for event in outbox.events] == ["OrderPlaced"]
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
        """Make an outbox with the arguments of `Outbox`, which decide which events are refused.

        Args:
            table: as of `Outbox`; there need be no such table.
            serializer: makes a value of each object, as that of `Outbox` does.
            cloud_events: the source of CloudEvents, if events become such.
            cloud_events_mode: as of `Outbox`.
            max_record_bytes: events whose records are larger are refused.
        """
        super().__init__(
            table,
            serializer=serializer,
            cloud_events=cloud_events,
            cloud_events_mode=cloud_events_mode,
            max_record_bytes=max_record_bytes,
        )
        self._encoder = _RecordingRowEncoder(serializer, cloud_events, max_record_bytes, cloud_events_mode)
        self.events: list[Event] = []

    def _write(self, connection: SyncConnection | AsyncConnection, rows: Iterable[Row]) -> Awaitable[None] | None:
        if is_async(connection):
            return self._record_async(connection, rows)
        self._record(connection, rows)
        return None

    async def _record_async(self, connection: AsyncConnection | SyncConnection, rows: Iterable[Row]) -> None:
        self._record(connection, rows)

    def _check(self, connection: SyncConnection | AsyncConnection) -> None:
        if not isinstance(connection, NonCallableMock):  # A mock has no transaction to check.
            super()._check(connection)

    def _record(self, connection: SyncConnection | AsyncConnection, rows: Iterable[Row]) -> None:
        self._check(connection)
        emitted = [cast("_RowOfEvent", row).event for row in rows]  # First all of them, as a generator may raise.
        self.events += emitted


class _RowOfEvent(tuple[Any, ...]):
    """A row, with its event."""

    event: Event


class _RecordingRowEncoder(RowEncoder):
    """Makes the same rows as an outbox, each with its event."""

    def row(self, event: Event) -> Row:
        """The event's row, which is a `_RowOfEvent`."""
        row = _RowOfEvent(super().row(event))
        row.event = event
        return cast("Row", row)
