"""How long a window's doubtful rows wait: those that Kafka may refuse. A transaction finds only the first of them.

It takes some 0.2 s, in which other rows wait. The more windows have doubtful rows, the longer each of them waits. So
most of the time is left to other rows, however many are doubtful.
"""

from __future__ import annotations

from outbox_plugin.core.intervals import RETRY_DOUBTFUL_SECONDS


class DoubtfulWindows:
    """The windows whose doubtful rows are held back now."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def hold(self, now: float) -> float:
        """Hold back those of one more window. Returns until when; times are seconds of the relay's clock."""
        self._ends = [end for end in self._ends if end > now]
        end = now + RETRY_DOUBTFUL_SECONDS * (len(self._ends) + 1)
        self._ends.append(end)
        return end
