"""Clocks that a test sets."""

from __future__ import annotations

from outbox_plugin.relay.runtime import Threads


class Clock(Threads):
    """A runtime with real threads, whose time the test decides."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """The time that the test has set."""
        return self.time


class SimulatedTime:
    """Takes the place of the module `time` in a module under test: time passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def monotonic(self) -> float:
        """The seconds that were slept."""
        return self.seconds

    def time(self) -> float:
        """The same seconds, as if the epoch began with them."""
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self.seconds += seconds
