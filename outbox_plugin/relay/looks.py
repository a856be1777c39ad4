"""How a term looks for rows: from the floor on, now and then below it, and not in vain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outbox_plugin.core.floor import Drawn, Floor, Span
from outbox_plugin.core.pace import MANY_ROWS
from outbox_plugin.core.ports import Outbox, Wanted
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.relay.hidden import HiddenRows
from outbox_plugin.relay.runtime import Runtime


class Looks:
    """Belongs to the stage that looks for rows.

    `wanted` is asked what of a span to read, and `read` does it: a read of a window, or a marking.
    """

    def __init__(
        self,
        outbox: Outbox,
        runtime: Runtime,
        wanted: Callable[[Span], Wanted],
        read: Callable[[Wanted], Sequence[OutboxRow]],
    ) -> None:
        self._runtime = runtime
        self._wanted = wanted
        self._read = read
        self._floor = Floor()
        self._hidden = HiddenRows(outbox)
        self._busy = False

    @property
    def hidden(self) -> bool:
        """Whether the last look was spared for rows that are hidden."""
        return self._hidden.still

    @property
    def sweeping(self) -> bool:
        """Whether more of a sweep is to be done at once."""
        return self._floor.sweeping

    def learned(self, drawn: Drawn) -> None:
        """Where the ids stand."""
        self._floor.learned(drawn)

    def start_again(self) -> None:
        """Rows that were passed over are wanted now."""
        self._floor.reset()
        self._hidden.forget()

    def look(self) -> Sequence[OutboxRow]:
        """The next rows: of a slice of a sweep that is due, or else from the floor on.

        Raises:
            StoreUnavailable: Postgres does not do as asked.
        """
        rows = self._sweep() or self._look()
        self._busy = len(rows) >= MANY_ROWS
        return rows

    def _sweep(self) -> Sequence[OutboxRow]:
        began = self._runtime.now()
        slice_ = self._floor.slice_due(began, busy=self._busy)
        if slice_ is None:
            return ()
        rows = self._read(self._wanted(slice_))
        self._floor.swept(slice_, rows[-1].id if rows else None, began, self._runtime.now())
        return rows

    def _look(self) -> Sequence[OutboxRow]:
        wanted = self._wanted(self._floor.span)
        if self._hidden.spare(wanted):
            return ()
        began = self._runtime.now()
        rows = self._read(wanted)
        now = self._runtime.now()
        self._hidden.looked(wanted, rows, now - began)
        self._floor.read(rows[-1].id if rows else None, now)
        return rows
