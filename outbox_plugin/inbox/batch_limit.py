"""How many records one transaction handles. Decides only; knows no clock and no thread."""

from __future__ import annotations

MAX_BATCH_RECORDS = 500
TARGET_SECONDS = 0.1
# A deadlock costs about a second (deadlock_timeout), so it is risked at most once in this time.
DEADLOCK_CAUTION_SECONDS = 60.0


class BatchLimit:
    """Sizes transactions so that each takes about `TARGET_SECONDS`.

    A slow handler gets its records one by one, on all connections; a fast one shares the cost of a transaction among
    hundreds of records.

    A transaction of many events locks many rows, in the order of its events. Two such transactions can deadlock over
    rows that their events share. After a deadlock, only one of them runs at a time for a while.
    """

    def __init__(self, max_records: int = MAX_BATCH_RECORDS, target_seconds: float = TARGET_SECONDS) -> None:
        self._max_records = max_records
        self._target_seconds = target_seconds
        self._limit = 1
        self._running = 0  # Transactions of more than one record.
        self._cautious_until = float("-inf")

    def limit(self, waiting: int, idle: int, now: float = 0.0) -> int:
        """Return how many records to take now.

        Args:
            waiting: the records that wait to be handled.
            idle: the workers that share them.
            now: monotonic seconds.
        """
        if self._running and now < self._cautious_until:
            return 1
        return max(1, min(self._limit, -(-waiting // max(idle, 1))))

    def start(self, records: int) -> None:
        """Count a transaction of this many records as running."""
        self._running += records > 1

    def finish(
        self, records: int, seconds: float, *, rolled_back: bool, deadlock: bool = False, now: float = 0.0
    ) -> None:
        """Adjust the limit by a transaction that has ended.

        Args:
            records: how many records were passed to `start`.
            seconds: how long they took.
            rolled_back: a record failed, so all of them had to be handled again.
            deadlock: it failed because of a deadlock.
            now: monotonic seconds.
        """
        self._running = max(0, self._running - (records > 1))
        if deadlock:
            self._cautious_until = now + DEADLOCK_CAUTION_SECONDS
        if rolled_back:
            self._limit = 1
        elif seconds > self._target_seconds:
            self._limit = max(1, int(records * self._target_seconds / seconds))
        elif records * 2 > self._limit:
            self._limit = min(self._max_records, self._limit * 2)
