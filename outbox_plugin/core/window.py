"""Windows in flight: what may be read next, and what the progress record must name.

All that changes the set of rows in flight is in this file. It knows neither the database nor Kafka: a window is read,
then published, then purged, always in that order, and windows are published in the order in which they were read.
Bad rows take their lane out of every window that is not yet published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outbox_plugin.core.held import HeldLanes
from outbox_plugin.core.ids import IdRanges
from outbox_plugin.core.lanes import BadRow, Lane, Lanes, before_bad_rows
from outbox_plugin.core.progress import Publication
from outbox_plugin.core.row import OutboxRow

ROWS_PER_WINDOW = 10_000  # Larger ones gain little and cost latency and memory; half as large costs a tenth in speed.
BYTES_PER_WINDOW = 8_000_000
ROWS_IN_FLIGHT = 4 * ROWS_PER_WINDOW  # One window being read, one waiting or being published, two being purged.
UNPURGED_WINDOWS = 16  # Small ones are purged together; each progress record names them all.


class Window:
    """A batch of earliest rows that is in flight together."""

    __slots__ = ("publication", "rows", "size")

    def __init__(self, rows: Sequence[OutboxRow]) -> None:
        self._keep(rows)

    def _keep(self, rows: Sequence[OutboxRow]) -> None:
        self.rows = rows
        self.size = len(rows)
        self.publication = Publication.of(rows)

    def halve(self) -> Window:
        """Keep the first half of the rows, of which there is at least one more; returns a window of the others."""
        half = len(self.rows) // 2
        rest = Window(self.rows[half:])
        self._keep(self.rows[:half])
        return rest

    def withhold(self, bad: Sequence[BadRow]) -> None:
        """Leave out the bad rows, and all that is behind them in their lanes."""
        self._keep(before_bad_rows(self.rows, bad))

    def leave_out(self, lanes: Lanes) -> None:
        """Leave out all rows of `lanes`: they are held back, and will be read again."""
        self._keep(lanes.let_through(self.rows))

    def published(self) -> Sequence[OutboxRow]:
        """Its rows have been handed over: to purge them, `publication` is enough. Returns the rows."""
        rows, self.rows = self.rows, ()
        return rows

    def bury(self, bad: Sequence[BadRow]) -> None:
        """Leave out the bad rows alone: they are dead letters."""
        gone = {each.row.id for each in bad}
        self._keep([row for row in self.rows if row.id not in gone])


def rows_in(windows: Iterable[Window]) -> int:
    """How many rows `windows` were read with and have kept, whether or not these have been handed over."""
    return sum(window.size for window in windows)


class Windows:
    """The windows of one term that are in flight, and the lanes that are parked."""

    def __init__(self) -> None:
        self._read: list[Window] = []
        self._published: list[Window] = []
        self._parked: dict[Lane, int] = {}  # With the count of parkings before it, to tell news from old news.
        self._parkings = 0
        self._held = HeldLanes()

    @property
    def in_flight(self) -> IdRanges:
        """The ids that must not be read again: read, or published and not yet known to be deleted."""
        return IdRanges.union(window.publication.ids for window in (*self._published, *self._read))

    @property
    def full(self) -> bool:
        """Whether reading on must wait until a window has been purged."""
        return (
            rows_in((*self._published, *self._read)) + ROWS_PER_WINDOW > ROWS_IN_FLIGHT
            or len(self._published) >= UNPURGED_WINDOWS
        )

    def admit(self, rows: Sequence[OutboxRow]) -> Window | None:
        """Take up rows that a read returned; None where all of them are in lanes that were parked since it began."""
        rows = Lanes(self.parked).let_through(rows)
        if not rows:
            return None
        window = Window(rows)
        self._read.append(window)
        return window

    @property
    def parked(self) -> frozenset[Lane]:
        """The lanes whose rows wait: parked ones, and those that this term holds back."""
        return self._held.lanes.union(self._parked)

    def hold(self, lanes: Mapping[Lane, float]) -> None:
        """Hold `lanes` back, each until the clock says so: in every window not yet published, and in every read."""
        self._held.hold(lanes)
        for window in self._read if lanes else ():
            window.leave_out(Lanes(lanes))

    def release_held(self, now: float) -> bool:
        """Let held lanes go on whose time is over. Returns whether there was one: its rows are to be read again."""
        return self._held.release(now)

    @property
    def parkings(self) -> int:
        """How many lanes were ever parked: to be noted before the database is asked, and handed to `learned`."""
        return self._parkings

    def park(self, bad: Sequence[BadRow]) -> None:
        """Let the bad rows' lanes wait: in every window that is not published, and in all that will be read."""
        for each in bad:
            self._parked[each.lane] = self._parkings
            self._parkings += 1
        for window in self._read:
            window.withhold(bad)

    def learned(self, parked: frozenset[Lane], parkings: int) -> bool:
        """The lanes that the database says are parked; whether any was released, so that its rows are to be read.

        It was asked when `parkings` had happened here: what was parked since, it does not know. A lane that somebody
        else parked waits from the next read on.
        """
        released = [lane for lane, number in self._parked.items() if number < parkings and lane not in parked]
        for lane in released:
            del self._parked[lane]
        for lane in parked - self._parked.keys():
            self._parked[lane] = self._parkings
            self._parkings += 1
        return bool(released)

    @property
    def unpurged(self) -> tuple[Publication, ...]:
        """What is published and not yet known to be deleted: every progress record names it."""
        return tuple(window.publication for window in self._published if window.publication.ids.ranges)

    def to_name(self, window: Window) -> tuple[Publication, ...]:
        """What the progress record in `window`'s transaction names: `window`, and all that may not be deleted yet.

        Raises:
            ValueError: `window` is not the next one to publish; publishing it would break the order.
        """
        if not self._read or self._read[0] is not window:
            raise ValueError("windows are published in the order in which they were read")
        return (*self.unpurged, window.publication)

    def halve(self, window: Window) -> Window:
        """Split `window`, the next one to publish; returns its second half, which comes next after it."""
        self.to_name(window)
        self._read.insert(1, rest := window.halve())
        return rest

    def published(self, window: Window) -> Sequence[OutboxRow]:
        """The transaction of `window`, the next one to publish, is committed; or it has no rows left to publish.

        Returns its rows, which it keeps no longer.
        """
        self.to_name(window)
        self._read.pop(0)
        self._published.append(window)
        return window.published()

    def purged(self, windows: Iterable[Window]) -> None:
        """The deletion of the rows of `windows` is durable: the next progress record need not name them."""
        for window in windows:
            self._published.remove(window)
