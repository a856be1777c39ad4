"""The backoff of rows that may be too large for their topic.

Each refused transaction takes some 0.2 s, identifies one such row, and delays all other rows. The more windows have
such rows, the longer each of them waits, up to a minute. So most of the time is left to other rows, unless more than a
hundred windows wait.
"""

from __future__ import annotations

from outbox_plugin.core.intervals import OVERSIZE_FIRST, OVERSIZE_LAST


class OversizeBackoff:
    """Knows until when the rows of which windows are held back."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def next_delay(self, now: float) -> float:
        """How many seconds the rows of one more window wait. `now` is in seconds of the relay's clock."""
        self._ends = [end for end in self._ends if end > now]
        seconds = min(OVERSIZE_FIRST * (len(self._ends) + 1), OVERSIZE_LAST)
        self._ends.append(now + seconds)
        return seconds
