"""Queues of the windows that are read and not yet published. Decides which of them are published next, together.

There are two queues: one of live windows, whose rows go before a backlog, and one of all other windows. Each
transaction takes the first of the other windows, together with the live windows that wait by then. So a live row waits
for the present transaction and for its own, and the backlog needs no further transactions. Each key keeps its order,
because a live row has no key of the backlog: see `core.backlog`. When the backlog ends, or becomes another one, the
live windows go first.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from outbox_plugin.core.row import length_of
from outbox_plugin.core.window import BYTES_PER_WINDOW, ROWS_PER_WINDOW, Window, rows_in

_WINDOWS_TOGETHER = 64  # A bound, because a progress record names each read that a transaction has rows of.


class QueuedWindow(NamedTuple):
    """A window, and when its read began, in seconds of the relay's clock."""

    window: Window
    read_at: float


class WindowQueue:
    """The two queues of one term."""

    def __init__(self) -> None:
        """No window waits."""
        self._live: deque[QueuedWindow] = deque()
        self._others: deque[QueuedWindow] = deque()
        self._first: deque[QueuedWindow] = deque()  # These go before both queues.
        self._live_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._live or self._others or self._first)

    @property
    def has_live(self) -> bool:
        """Whether a window of live rows waits."""
        return bool(self._live)

    @property
    def live_is_full(self) -> bool:
        """Whether the live rows that wait are enough for a transaction."""
        return self._live_bytes >= BYTES_PER_WINDOW

    @property
    def has_others(self) -> bool:
        """Whether a window of other rows waits."""
        return bool(self._others or self._first)

    def put(self, queued: QueuedWindow, *, is_live: bool) -> None:
        """Add a window at the end of its queue."""
        (self._live if is_live else self._others).append(queued)
        if is_live:
            self._live_bytes += sum(map(length_of, queued.window.rows))

    def take(self) -> list[QueuedWindow]:
        """Take the next windows, to be published together: one of each queue, and more live ones while they are small.

        The windows before both queues are taken one by one: each may have live rows, which later ones must not pass.
        """
        if self._first:
            return [self._first.popleft()]
        taken = [queue.popleft() for queue in (self._others, self._live) if queue]
        rows = rows_in(each.window for each in taken)
        while self._live and len(taken) < _WINDOWS_TOGETHER:
            if (rows := rows + self._live[0].window.size) > ROWS_PER_WINDOW:
                break
            taken.append(self._live.popleft())
        if not self._live:
            self._live_bytes = 0
        return taken

    def put_back(self, part: QueuedWindow) -> None:
        """Put the second half of the window that was taken last before all others."""
        self._first.appendleft(part)

    def join(self) -> None:
        """Put the live windows before all others that wait, and before all that are read from now on."""
        self._first.extend(self._live)
        self._live.clear()
        self._live_bytes = 0
