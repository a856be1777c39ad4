"""Exponential backoff. No clock and no randomness of its own."""

from __future__ import annotations


class Backoff:
    """Waits that double from `first` to `last` seconds until something succeeds."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last = first, last
        self._next = first

    def succeeded(self) -> None:
        """Start again with the shortest wait."""
        self._next = self._first

    def wait(self, jitter: float = 0.0) -> float:
        """The seconds to wait now; `jitter`, from 0 to 1, takes away up to half of them."""
        seconds, self._next = self._next, min(self._next * 2, self._last)
        return seconds * (1 - jitter / 2)
