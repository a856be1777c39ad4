"""How long to wait before the next try. Seconds; what is random is handed in."""

from __future__ import annotations

IDLE_FIRST, IDLE_LAST = 0.001, 0.05
LONG_LOOK_SECONDS = 0.005  # One that finds nothing takes a tenth of that, unless it passes over rows.
HIDDEN_SECONDS = 0.005  # To ask whether they can be seen by now costs far less than to look.
STEADY_SECONDS = 0.025  # While rows come more often, the waits do not grow.
ERROR_FIRST, ERROR_LAST = 0.25, 8.0
RETRY_ASIDE_SECONDS = 10.0  # A bad row that the database refuses to put aside is tried again after so long.
CONTROL_BUSY_SECONDS, CONTROL_IDLE_SECONDS = 0.25, 1.0  # How often the database is asked what is ordered.
CONTROL_ASLEEP_SECONDS, READ_ASLEEP_SECONDS = 5.0, 1.0  # Behind the wake-up, in case that one is lost.
PURGE_ROWS, PURGE_REST_SECONDS = 500, 0.02  # Fewer rows wait for more, because each purge is a commit of its own.
MANY_ROWS = 500  # So many at once, and it is the cost of each that counts, no longer that of asking for them.
CLEAR_PROGRESS_SECONDS = 5.0  # So long after its last record, an idle leader writes one that names no rows any more.
POLL_FIRST, POLL_LAST = 0.1, 1.0  # To ask for something that another harvester does once.
SLEEP_AFTER_SECONDS = 0.1  # While rows come more often, reading again is cheaper than being woken.


class Backoff:
    """Waits that double from `first` to `last` seconds until something succeeds."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last
        self._next = first

    def succeeded(self) -> None:
        """Start again with the shortest wait."""
        self._next = self._first

    def wait(self, jitter: float = 0.0) -> float:
        """The seconds to wait now; `jitter`, from 0 to 1, takes away up to half of them."""
        seconds, self._next = self._next, min(self._next * 2, self._last)
        return seconds * (1 - jitter / 2)
