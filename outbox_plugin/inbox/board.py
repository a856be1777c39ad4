"""The lanes, shared: the poller adds records, handlers take them and say what became of them.

The one place where threads meet. Handlers in threads wait here; those in an event loop leave a callback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from outbox_plugin.inbox.lanes import Handled, Lanes, Position, Slice, Together
from outbox_plugin.inbox.received import Place, Received

Waker = Callable[[], None]


class Board:
    """`Lanes` under a lock, with the clock."""

    def __init__(self, seats: int, batch_size: int | None = None) -> None:
        """`batch_size`: so many records are taken at once, however long they take."""
        self._lanes = Lanes()
        self._together = Together() if batch_size is None else Together(batch_size, float("inf"))
        self._changed = threading.Condition()
        self._wakers: list[Waker] = []
        self._idle = seats
        self._stopped = False

    def on_change(self, waker: Waker) -> None:
        """Call `waker`, from any thread and under the lock, when there may be something to take."""
        with self._changed:
            self._wakers.append(waker)

    def add(self, records: Collection[Received]) -> None:
        """Records have come."""
        with self._changed:
            for record in records:
                self._lanes.add(record)
            self._notify()

    def assign(
        self,
        places: Iterable[Place],
        topic_ids: Mapping[str, str] | None = None,
        starts: Mapping[Place, int] | None = None,
    ) -> None:
        """See `Lanes.assign`."""
        with self._changed:
            self._lanes.assign(places, topic_ids, starts)

    def places(self) -> list[Place]:
        """The partitions that are ours."""
        with self._changed:
            return self._lanes.places()

    def held(self) -> int:
        """How many records are held."""
        with self._changed:
            return self._lanes.held

    def held_bytes(self) -> int:
        """How many bytes these have."""
        with self._changed:
            return self._lanes.held_bytes

    def wait_for_room(self, records: int, held_bytes: int, patience_seconds: float) -> bool:
        """Wait until less than so many records, and so many bytes, are held; False if that takes longer."""

        def has_room() -> bool:
            return self._stopped or (self._lanes.held < records and self._lanes.held_bytes < held_bytes)

        with self._changed:
            return self._changed.wait_for(has_room, patience_seconds)

    def wait_and_take(self) -> list[Slice] | None:
        """Records to handle now, as soon as there are any; None once it is time to end."""
        with self._changed:
            while not self._stopped:
                if slices := self._take():
                    return slices
                due = self._lanes.next_due()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
            return None

    def take(self) -> tuple[list[Slice] | None, float | None]:
        """Records to handle now, perhaps none, or None once it is time to end; and in how many seconds to ask again."""
        with self._changed:
            if self._stopped:
                return None, None
            slices = self._take()
            due = self._lanes.next_due()
            return slices, None if due is None else max(0.0, due - time.monotonic())

    def _take(self) -> list[Slice]:
        now = time.monotonic()
        slices = self._lanes.take(self._together.limit(self._lanes.waiting, self._idle, now), now)
        self._idle -= bool(slices)
        self._together.begun(sum(len(taken.records) for taken in slices))
        return slices

    def finish(self, slices: list[Slice], handled: Handled, seconds: float) -> None:
        """What was taken has been handled, in so many seconds."""
        now = time.monotonic()
        with self._changed:
            self._idle += 1
            for taken, outcome in zip(slices, handled.outcomes, strict=True):
                self._lanes.finish(taken, outcome, now)
            records = sum(len(taken.records) for taken in slices)
            self._together.done(records, seconds, undone=handled.undone, deadlock=handled.deadlock, now=now)
            self._notify()

    def committable(self) -> dict[Place, int]:
        """See `Lanes.committable`."""
        with self._changed:
            return self._lanes.committable()

    def positions(self) -> dict[Place, Position]:
        """See `Lanes.positions`."""
        with self._changed:
            return self._lanes.positions()

    def hand_over(self, places: Iterable[Place], patience_seconds: float) -> dict[Place, int]:
        """Take no more records of these partitions, and let those that are being handled come to their end.

        Returns where the partitions would go on. They are ours no more.
        """
        places = list(places)
        with self._changed:
            self._lanes.close(places)
            self._changed.wait_for(lambda: not self._lanes.running(places), patience_seconds)
            reached = self._lanes.committable(places)
            self._lanes.revoke(places)
            return reached

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._stopped = True
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for waker in self._wakers:
            waker()
