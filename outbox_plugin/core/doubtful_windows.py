"""How long a window's doubtful rows wait: those that Kafka may refuse. A transaction finds only the first of them.

It takes some 0.2 s, in which other rows wait. The more windows have doubtful rows, the longer each of them waits, up to
a minute. So most of the time is left to other rows, also where many are doubtful.
"""

from __future__ import annotations

from outbox_plugin.core.intervals import DOUBTFUL_FIRST, DOUBTFUL_LAST


class DoubtfulWindows:
    """The windows whose doubtful rows are held back now."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def hold(self, now: float) -> float:
        """Hold back those of one more window. Returns for how many seconds; `now` is in those of the relay's clock."""
        self._ends = [end for end in self._ends if end > now]
        seconds = min(DOUBTFUL_FIRST * (len(self._ends) + 1), DOUBTFUL_LAST)
        self._ends.append(now + seconds)
        return seconds
