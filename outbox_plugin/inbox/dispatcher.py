"""The queues, shared: the poller adds records, handlers take them and say what became of them.

The one place where threads meet. Handlers in threads wait here; those in an event loop leave a callback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.batch_limit import BatchLimit
from outbox_plugin.inbox.key_queues import HandlingResult, KeyBatch, KeyQueues, PartitionPosition
from outbox_plugin.inbox.received import Received

Waker = Callable[[], None]


class Dispatcher:
    """`KeyQueues` under a lock, with the clock."""

    def __init__(self, workers: int, batch_size: int | None = None) -> None:
        """`batch_size`: so many records are taken at once, however long they take."""
        self._queues = KeyQueues()
        self._batch_limit = BatchLimit() if batch_size is None else BatchLimit(batch_size, float("inf"))
        self._changed = threading.Condition()
        self._wakers: list[Waker] = []
        self._idle = workers
        self._stopped = False

    def on_change(self, waker: Waker) -> None:
        """Call `waker`, from any thread and under the lock, when there may be something to take."""
        with self._changed:
            self._wakers.append(waker)

    def add(self, records: Collection[Received]) -> None:
        """Records have come."""
        with self._changed:
            for record in records:
                self._queues.add(record)
            self._notify()

    def assign(
        self,
        partitions: Iterable[TopicPartition],
        topic_ids: Mapping[str, str] | None = None,
        start_offsets: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """See `KeyQueues.assign`."""
        with self._changed:
            self._queues.assign(partitions, topic_ids, start_offsets)

    def partitions(self) -> list[TopicPartition]:
        """The partitions that are ours."""
        with self._changed:
            return self._queues.partitions()

    def held(self) -> int:
        """How many records are held."""
        with self._changed:
            return self._queues.held

    def held_bytes(self) -> int:
        """How many bytes these have."""
        with self._changed:
            return self._queues.held_bytes

    def wait_for_room(self, records: int, held_bytes: int, patience_seconds: float) -> bool:
        """Wait until less than so many records, and so many bytes, are held; False if that takes longer."""

        def has_room() -> bool:
            return self._stopped or (self._queues.held < records and self._queues.held_bytes < held_bytes)

        with self._changed:
            return self._changed.wait_for(has_room, patience_seconds)

    def wait_and_take(self) -> list[KeyBatch] | None:
        """Records to handle now, as soon as there are any; None once it is time to end."""
        with self._changed:
            while not self._stopped:
                if batches := self._take():
                    return batches
                due = self._queues.next_due()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
            return None

    def take(self) -> tuple[list[KeyBatch] | None, float | None]:
        """Records to handle now, perhaps none, or None once it is time to end; and in how many seconds to ask again."""
        with self._changed:
            if self._stopped:
                return None, None
            batches = self._take()
            due = self._queues.next_due()
            return batches, None if due is None else max(0.0, due - time.monotonic())

    def _take(self) -> list[KeyBatch]:
        now = time.monotonic()
        batches = self._queues.take(self._batch_limit.limit(self._queues.waiting, self._idle, now), now)
        self._idle -= bool(batches)
        self._batch_limit.start(sum(len(taken.records) for taken in batches))
        return batches

    def finish(self, batches: list[KeyBatch], handled: HandlingResult, seconds: float) -> None:
        """What was taken has been handled, in so many seconds."""
        now = time.monotonic()
        with self._changed:
            self._idle += 1
            for taken, outcome in zip(batches, handled.outcomes, strict=True):
                self._queues.finish(taken, outcome, now)
            records = sum(len(taken.records) for taken in batches)
            self._batch_limit.finish(
                records, seconds, rolled_back=handled.rolled_back, deadlock=handled.deadlock, now=now
            )
            self._notify()

    def committable(self) -> dict[TopicPartition, int]:
        """See `KeyQueues.committable`."""
        with self._changed:
            return self._queues.committable()

    def positions(self) -> dict[TopicPartition, PartitionPosition]:
        """See `KeyQueues.positions`."""
        with self._changed:
            return self._queues.positions()

    def release(self, partitions: Iterable[TopicPartition], patience_seconds: float) -> dict[TopicPartition, int]:
        """Take no more records of these partitions, and let those that are being handled come to their end.

        Returns where the partitions would go on. They are ours no more.
        """
        partitions = list(partitions)
        with self._changed:
            self._queues.close(partitions)
            self._changed.wait_for(lambda: not self._queues.running(partitions), patience_seconds)
            reached = self._queues.committable(partitions)
            self._queues.revoke(partitions)
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
