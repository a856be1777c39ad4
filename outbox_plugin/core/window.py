"""Windows in flight: what may be read next, and what the progress record must name.

All that changes the set of rows in flight is in this file. It knows neither the database nor Kafka: a window is read,
then published, then purged, always in that order, and windows are published in the order in which they were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outbox_plugin.core.ids import IdRanges
from outbox_plugin.core.progress import Publication
from outbox_plugin.core.row import OutboxRow

ROWS_PER_WINDOW = 5_000  # Larger ones gain nothing and cost latency and memory.
WINDOWS_IN_FLIGHT = 4  # One being read, one waiting or being published, two being purged.


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A batch of earliest rows that is in flight together."""

    rows: Sequence[OutboxRow]
    publication: Publication


class Windows:
    """The windows of one term that are in flight."""

    def __init__(self) -> None:
        self._read: list[Window] = []
        self._published: list[Window] = []

    @property
    def in_flight(self) -> IdRanges:
        """The ids that must not be read again: read, or published and not yet known to be deleted."""
        return IdRanges.union(window.publication.ids for window in (*self._published, *self._read))

    @property
    def full(self) -> bool:
        """Whether reading on must wait until a window has been purged."""
        return len(self._read) + len(self._published) >= WINDOWS_IN_FLIGHT

    def admit(self, rows: Sequence[OutboxRow]) -> Window:
        """Take up rows, at least one, that a read returned."""
        window = Window(rows, Publication.of(rows))
        self._read.append(window)
        return window

    @property
    def unpurged(self) -> tuple[Publication, ...]:
        """What is published and not yet known to be deleted: every progress record names it."""
        return tuple(window.publication for window in self._published)

    def to_name(self, window: Window) -> tuple[Publication, ...]:
        """What the progress record in `window`'s transaction names: `window`, and all that may not be deleted yet.

        Raises:
            ValueError: `window` is not the next one to publish; publishing it would break the order.
        """
        if not self._read or self._read[0] is not window:
            raise ValueError("windows are published in the order in which they were read")
        return (*self.unpurged, window.publication)

    def published(self, window: Window) -> None:
        """The transaction of `window`, the next one to publish, is committed."""
        self.to_name(window)
        self._read.pop(0)
        self._published.append(window)

    def purged(self, window: Window) -> None:
        """The deletion of `window`'s rows is durable: the next progress record need not name them."""
        self._published.remove(window)
