"""Windows in flight: what may be read next, and what the progress record must name.

Only this file changes the set of rows in flight. It knows neither the database nor Kafka. A window is read, then
published, then purged, always in that order. Windows are published in the order in which they were read, except those
of live rows, which are published together with a window of the backlog: see `core.window_queue`.
A bad row takes the later rows of its ordering key out of every window that is not yet published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outbox_plugin.core.bad_rows import BadRow, before_bad_rows
from outbox_plugin.core.held_keys import HeldKeys
from outbox_plugin.core.id_ranges import IdRanges
from outbox_plugin.core.ordering_key import OrderingKey, OrderingKeys
from outbox_plugin.core.parked_keys import ParkedKeys
from outbox_plugin.core.progress import Publication, publications_of
from outbox_plugin.core.row import OutboxRow, Rows, fields_of

ROWS_PER_WINDOW = 10_000  # Larger ones gain little speed, and cost latency and memory. Half as large is 10 % slower.
BYTES_PER_WINDOW = 8_000_000
ROWS_IN_FLIGHT = 4 * ROWS_PER_WINDOW  # One window being read, one waiting or being published, two being purged.
UNPURGED_WINDOWS = 16  # Small windows are purged together. Each progress record names all unpurged windows.


class Window:
    """A batch of rows that is in flight together. They ascend by id."""

    __slots__ = ("publications", "rows", "size")

    def __init__(self, rows: Sequence[OutboxRow]) -> None:
        self._keep(rows)

    def _keep(self, rows: Sequence[OutboxRow]) -> None:
        self.rows = rows
        self.size = len(rows)
        self.publications = publications_of(rows)

    @classmethod
    def merged(cls, windows: Sequence[Window]) -> Window:
        """One window that takes the rows of all `windows`."""
        if len(windows) == 1:
            return windows[0]
        return cls(Rows([fields for window in windows for fields in fields_of(window.drop_rows())]).sorted())

    def halve(self) -> Window:
        """Keep the first half of at least two rows. Returns a window of the others."""
        half = len(self.rows) // 2
        rest = Window(self.rows[half:])
        self._keep(self.rows[:half])
        return rest

    def withhold(self, bad: Sequence[BadRow]) -> None:
        """Leave out the bad rows and the later rows of their ordering keys."""
        self._keep(before_bad_rows(self.rows, bad))

    def leave_out(self, held: OrderingKeys) -> None:
        """Leave out all rows of the keys that are held back. They are read again later."""
        self._keep(held.without_rows_of_these(self.rows))

    def drop_rows(self) -> Sequence[OutboxRow]:
        """Drop the rows once they are published, and return them. `publications` are enough to purge them."""
        rows, self.rows = self.rows, ()
        return rows

    def leave_out_dead_letters(self, bad: Sequence[BadRow]) -> None:
        """Leave out bad rows that have become dead letters. The later rows of their keys stay."""
        gone = {row.row.id for row in bad}
        self._keep([row for row in self.rows if row.id not in gone])


def rows_in(windows: Iterable[Window]) -> int:
    """How many rows `windows` have, those included that a window has dropped after it was published."""
    return sum(window.size for window in windows)


class Windows:
    """The windows of one term that are in flight, and the ordering keys that wait."""

    def __init__(self) -> None:
        self._read: list[Window] = []
        self._published: list[Window] = []
        self._parked = ParkedKeys()
        self._held = HeldKeys()

    @property
    def in_flight(self) -> IdRanges:
        """The ids that must not be read again: read, or published and not yet known to be deleted."""
        return IdRanges.union(each.ids for window in (*self._published, *self._read) for each in window.publications)

    @property
    def full(self) -> bool:
        """Whether the next read must wait until a window has been purged."""
        return (
            rows_in((*self._published, *self._read)) + ROWS_PER_WINDOW > ROWS_IN_FLIGHT
            or len(self._published) >= UNPURGED_WINDOWS
        )

    def admit(self, rows: Sequence[OutboxRow]) -> Window | None:
        """The window of the rows that a read returned; None if all of their keys were parked after the read began."""
        rows = OrderingKeys(self.excluded_keys).without_rows_of_these(rows)
        if not rows:
            return None
        window = Window(rows)
        self._read.append(window)
        return window

    @property
    def excluded_keys(self) -> frozenset[OrderingKey]:
        """The keys whose rows wait: parked ones, and those that this term holds back."""
        return self._held.keys | self._parked.keys

    def hold(self, until: Mapping[OrderingKey, float]) -> None:
        """Hold keys back, each until its time, in every window that is not yet published and in every later read."""
        self._held.hold(until)
        for window in self._read if until else ():
            window.leave_out(OrderingKeys(until))

    def release_held(self, now: float) -> bool:
        """Release held keys whose time is over. Returns whether there was one: read from the beginning then."""
        return self._held.release(now)

    @property
    def parkings(self) -> int:
        """How many keys were ever parked. Note it before the database is asked, and pass it to `update_parked`."""
        return self._parked.parkings

    def park(self, bad: Sequence[BadRow]) -> None:
        """Park the bad rows' keys, in every window that is not yet published and in every later read."""
        self._parked.park(row.ordering_key for row in bad)
        for window in self._read:
            window.withhold(bad)

    def update_parked(self, parked: frozenset[OrderingKey], parkings: int) -> bool:
        """Take in which keys the database says are parked: see `ParkedKeys.update`.

        A key that somebody else parked waits from the next read on.
        """
        return self._parked.update(parked, parkings)

    @property
    def unpurged(self) -> tuple[Publication, ...]:
        """What is published and not yet known to be deleted: every progress record names it."""
        return tuple(each for window in self._published for each in window.publications)

    def publish_next(self, windows: Sequence[Window]) -> Window:
        """Make one window of `windows`, and publish it next, before others that were read earlier.

        Each key keeps its order only if no window that was read earlier has a row of the same keys.

        Returns:
            The window that takes their place.
        """
        for window in windows:
            self._read.remove(window)
        self._read.insert(0, merged := Window.merged(windows))
        return merged

    def publications_with(self, window: Window) -> tuple[Publication, ...]:
        """What the progress record in `window`'s transaction must name: `window`, and all that may not be deleted yet.

        Raises:
            ValueError: `window` is not the next one to publish; publishing it would break the order.
        """
        if not self._read or self._read[0] is not window:
            raise ValueError("another window is to be published before this one")
        return (*self.unpurged, *window.publications)

    def halve(self, window: Window) -> Window:
        """Split `window`, the next one to publish; returns its second half, which comes next after it."""
        self.publications_with(window)
        self._read.insert(1, rest := window.halve())
        return rest

    def mark_published(self, window: Window) -> Sequence[OutboxRow]:
        """Take in that `window`, the next one to publish, is committed, or has no rows left to publish.

        Returns:
            Its rows, which the window drops.
        """
        self.publications_with(window)
        self._read.pop(0)
        self._published.append(window)
        return window.drop_rows()

    def mark_purged(self, windows: Iterable[Window]) -> None:
        """Take in that the rows of `windows` are deleted durably: the next progress record need not name them."""
        for window in windows:
            self._published.remove(window)
