"""What the poller does for exactly-once delivery: it reads rows that are neither in flight nor waiting."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_plugin.core.batch_size import BatchSize
from outbox_plugin.core.low_watermark import IdRange
from outbox_plugin.core.ports import Control, ReadRequest, WindowStore
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.window import Windows
from outbox_plugin.relay.poller import Source
from outbox_plugin.relay.runtime import Lock


class WindowSource:
    """Belongs to the stage that reads; `lock` guards `windows`, which other stages change."""

    def __init__(self, store: WindowStore, windows: Windows, lock: Lock) -> None:
        self._store = store
        self._windows = windows
        self._lock = lock
        self._batch_size = BatchSize()

    def source(self) -> Source:
        """What the poller calls."""
        return Source(self._control, self._held_are_released, self._request, self._read, self._store.snapshot)

    def _control(self) -> tuple[Control, bool]:
        with self._lock:
            parkings = self._windows.parkings
        control = self._store.control()
        with self._lock:
            return control, self._windows.update_parked(control.parked, parkings)

    def _held_are_released(self, now: float) -> bool:
        with self._lock:
            return self._windows.release_held(now)

    def _request(self, ids: IdRange) -> ReadRequest:
        with self._lock:
            in_flight, parked = self._windows.in_flight.above(ids.above), self._windows.parked
        return ReadRequest(self._batch_size.rows, ids, in_flight, parked)

    def _read(self, request: ReadRequest) -> Sequence[OutboxRow]:
        rows = self._store.read(request)
        if rows:
            self._batch_size.update(rows)
        return rows
