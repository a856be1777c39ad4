"""The dispatcher: the poller adds records, workers take them and report what became of them.

The one place where the inbox's threads meet. Workers in threads wait here; workers in an event loop leave a callback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.batch_limit import BatchLimit
from outbox_plugin.inbox.inbox_readiness import DispatcherFacts
from outbox_plugin.inbox.key_queues import HandlingResult, KeyBatch, KeyQueues
from outbox_plugin.inbox.received import Received

Waker = Callable[[], None]
T = TypeVar("T")


class Dispatcher:
    """Key queues and a batch limit, with a lock and a clock."""

    def __init__(self, workers: int, batch_size: int | None = None) -> None:
        """Begin without partitions.

        Args:
            workers: how many workers take records.
            batch_size: the highest number of records that are taken at once, however long they take; None to size
                transactions by the time that they take.
        """
        self._queues = KeyQueues()
        self._batch_limit = BatchLimit() if batch_size is None else BatchLimit(batch_size, float("inf"))
        self._changed = threading.Condition()
        self._wakers: list[Waker] = []
        self._idle = workers
        self._stopped = False
        self._taken_at: dict[int, float] = {}  # When each list of key batches was taken that a worker has, by its id.
        self._done_at = 0.0  # When a record was last done, or the first came while none was held.

    def locked(self, action: Callable[[KeyQueues], T]) -> T:
        """Run `action` on the key queues, while no other thread uses them, and return its result."""
        with self._changed:
            return action(self._queues)

    def on_change(self, waker: Waker) -> None:
        """Call `waker`, from any thread and under the lock, when there may be records to take."""
        with self._changed:
            self._wakers.append(waker)

    def add(self, records: Collection[Received], left_out: Collection[int] = ()) -> None:
        """Queue records.

        Args:
            records: the records, each partition's in their order.
            left_out: the `id()` of those that were handled before.
        """
        if not records:
            return  # Without waking the workers.
        with self._changed:
            if not self._queues.held:
                self._done_at = time.monotonic()
            for record in records:
                if id(record) in left_out:
                    self._queues.leave_out(record)
                else:
                    self._queues.add(record)
            self._notify()

    def facts(self) -> DispatcherFacts:
        """Return since when records have been waiting or handled."""
        with self._changed:
            taken_at = min(self._taken_at.values(), default=None)
            return DispatcherFacts(taken_at, self._done_at if self._queues.held else None)

    def wait_until(self, condition: Callable[[KeyQueues], bool], patience_seconds: float) -> bool:
        """Wait until a condition holds, or the dispatcher is stopped.

        Args:
            condition: is called under the lock after each change.
            patience_seconds: how long to wait at most.

        Returns:
            False if that took too long.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._stopped or condition(self._queues), patience_seconds)

    def wait_and_take(self) -> list[KeyBatch] | None:
        """Wait for records to handle, and take them; None once the dispatcher is stopped."""
        with self._changed:
            while not self._stopped:
                if batches := self._take():
                    return batches
                due = self._queues.next_due()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
            return None

    def take(self) -> tuple[list[KeyBatch] | None, float | None]:
        """Take records to handle, without waiting.

        Returns:
            The records, perhaps none, or None once the dispatcher is stopped; and the seconds after which a retry is
            due, None if none is.
        """
        with self._changed:
            if self._stopped:
                return None, None
            batches = self._take()
            due = self._queues.next_due()
            return batches, None if due is None else max(0.0, due - time.monotonic())

    def _take(self) -> list[KeyBatch]:
        now = time.monotonic()
        batches = self._queues.take(self._batch_limit.limit(self._queues.waiting, self._idle, now), now)
        if batches:
            self._idle -= 1
            self._taken_at[id(batches)] = now
        self._batch_limit.start(sum(len(taken.records) for taken in batches))
        return batches

    def finish(self, batches: list[KeyBatch], result: HandlingResult, seconds: float) -> None:
        """Give back what was taken.

        Args:
            batches: the key batches, as they were taken.
            result: what became of them.
            seconds: how long they were handled.
        """
        now = time.monotonic()
        with self._changed:
            self._idle += 1
            del self._taken_at[id(batches)]
            if any(outcome.done for outcome in result.outcomes):
                self._done_at = now
            for taken, outcome in zip(batches, result.outcomes, strict=True):
                self._queues.finish(taken, outcome, now)
            records = sum(len(taken.records) for taken in batches)
            self._batch_limit.finish(
                records, seconds, rolled_back=result.rolled_back, deadlock=result.deadlock, now=now
            )
            self._notify()

    def release(self, partitions: Iterable[TopicPartition], patience_seconds: float) -> dict[TopicPartition, int]:
        """Give up partitions, after the records that are being handled have ended.

        Args:
            partitions: the partitions; no more of their records are taken.
            patience_seconds: how long to wait for handlers at most.

        Returns:
            The positions of those partitions whose position has changed since `committable` last returned it.
        """
        partitions = list(partitions)
        with self._changed:
            self._queues.close(partitions)
            self._changed.wait_for(lambda: not self._queues.running(partitions), patience_seconds)
            reached = self._queues.committable(partitions)
            self._queues.revoke(partitions)
            return reached

    def wait_for_some(
        self, busy: Mapping[TopicPartition, Callable[[], bool]], patience_seconds: float
    ) -> set[TopicPartition]:
        """Wait until a partition's records are not being handled any more.

        Args:
            busy: the partitions, as `KeyQueues.busy` returned them; they may have been given up since.
            patience_seconds: how long to wait at most.

        Returns:
            The partitions whose records are not being handled any more; none if that took too long.
        """

        def ended() -> set[TopicPartition]:
            return {tp for tp, is_running in busy.items() if not is_running()}

        with self._changed:
            return self._changed.wait_for(ended, patience_seconds)

    def stop(self) -> None:
        """Let nobody take records any more."""
        with self._changed:
            self._stopped = True
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for waker in self._wakers:
            waker()
