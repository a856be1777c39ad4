"""What a term reads, and when: behind the floor, without parked lanes, not while paused."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_plugin.core.floor import Span
from outbox_plugin.core.pace import MANY_ROWS
from outbox_plugin.core.portion import Portion
from outbox_plugin.core.ports import OutboxStore, WakeUp, Wanted
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.window import Windows
from outbox_plugin.relay.events import Observer, RowsRead
from outbox_plugin.relay.looks import Looks
from outbox_plugin.relay.rest import Rest
from outbox_plugin.relay.stages import Stages


class Intake:
    """Reads the windows of one term; its `read` is called by one thread."""

    def __init__(
        self,
        shard: int,
        store: OutboxStore,
        windows: Windows,
        stages: Stages,
        wake_up: WakeUp | None,
        observe: Observer,
    ) -> None:
        self._shard = shard
        self._observe = observe
        self._store = store
        self._windows = windows
        self._stages = stages
        self._rest = Rest(stages, wake_up)
        self._looks = Looks(store, stages.runtime, self._wanted, self._read_wanted)
        self._portion = Portion()
        self._paused = False
        self.many = False  # Whether the last read brought so much that the next is worth an early start.

    def read(self) -> Sequence[OutboxRow]:
        """The next rows; none after a rest, of a length that depends on how long nothing has come."""
        now = self._stages.runtime.now()
        if self._rest.control_is_due(now):
            self._obey()
        with self._stages.lock:
            released = self._windows.release_held(now)
        if released:
            self._looks.start_again()
        self.many = False
        rows = () if self._paused else self._read()
        if rows:
            self._rest.rows_came(now)
        elif self._paused or not self._looks.sweeping:
            self._rest.take(now, paused=self._paused, hidden=self._looks.hidden)
        return rows

    def interrupt(self) -> None:
        """The term is to end: end a sleep."""
        self._rest.interrupt()

    def _obey(self) -> None:
        """Ask the database what is ordered, and where the ids stand."""
        with self._stages.lock:
            parkings = self._windows.parkings
        control = self._store.control()
        self._paused = control.paused
        self._looks.learned(control.drawn)
        with self._stages.lock:
            released = self._windows.learned(control.parked, parkings)
        if released:
            self._looks.start_again()

    def _read(self) -> Sequence[OutboxRow]:
        rows = self._looks.look()
        self.many = len(rows) >= min(MANY_ROWS, self._portion.rows)
        if rows:
            self._portion.learned(rows)
        return rows

    def _read_wanted(self, wanted: Wanted) -> Sequence[OutboxRow]:
        began = self._stages.runtime.now()
        rows = self._store.read(wanted)
        self._observe(RowsRead(self._shard, len(rows), self._stages.runtime.now() - began))
        return rows

    def _wanted(self, span: Span) -> Wanted:
        with self._stages.lock:
            in_flight, parked = self._windows.in_flight.above(span.floor), self._windows.parked
        return Wanted(self._portion.rows, span, in_flight, parked)
