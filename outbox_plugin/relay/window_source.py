"""What the poller does for exactly-once delivery: it reads rows that are neither in flight nor waiting."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_plugin.core.adaptive_read_limit import AdaptiveReadLimit
from outbox_plugin.core.id_ranges import IdRanges
from outbox_plugin.core.poll_schedule import Read
from outbox_plugin.core.postgres_ports import Control, ReadRequest, WindowStore
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.rows_beside_live import RowsBesideLive
from outbox_plugin.core.window import Windows
from outbox_plugin.relay.live_rows import LiveRows
from outbox_plugin.relay.poller import Source
from outbox_plugin.relay.runtime import Lock


class WindowSource:
    """Belongs to the stage that reads; `lock` guards `windows`, which other stages change."""

    def __init__(
        self, store: WindowStore, windows: Windows, lock: Lock, live_rows: LiveRows, rows_beside_live: RowsBesideLive
    ) -> None:
        """Nothing is read yet.

        Args:
            store: where the rows are.
            windows: those of the term.
            lock: guards `windows`.
            live_rows: what reads live rows before a backlog.
            rows_beside_live: how many rows of the backlog are read at a time meanwhile.
        """
        self._store = store
        self._live_rows = live_rows
        self._rows_beside_live = rows_beside_live
        self._windows = windows
        self._lock = lock
        self._read_limit = AdaptiveReadLimit()

    def source(self) -> Source:
        """What the poller calls."""
        return Source(
            self._control, self._held_are_released, self._request, self._read, self._store.snapshot, self._live_rows
        )

    def _control(self) -> tuple[Control, bool]:
        with self._lock:
            parkings = self._windows.parkings
        control = self._store.control()
        with self._lock:
            return control, self._windows.update_parked(control.parked, parkings)

    def _held_are_released(self, now: float) -> bool:
        with self._lock:
            return self._windows.release_held(now)

    def _request(self, read: Read) -> ReadRequest:
        above = read.ids.above
        with self._lock:
            in_flight, excluded = self._windows.in_flight.above(above), self._windows.excluded_keys
        if read.is_live:
            in_flight = IdRanges.union((in_flight, self._live_rows.waiting.above(above)))
        rows = self._read_limit.rows
        if self._live_rows.came_lately and not read.is_live:
            rows = min(rows, self._rows_beside_live.rows)
        return ReadRequest(rows, read.ids, in_flight, excluded, is_live=read.is_live)

    def _read(self, request: ReadRequest) -> Sequence[OutboxRow]:
        rows = self._store.read(request)
        if rows:
            self._read_limit.update(rows)
        return rows
