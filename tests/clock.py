"""A clock that a test sets."""

from __future__ import annotations

from outbox_plugin.relay.runtime import Threads


class Clock(Threads):
    """A runtime with real threads, whose time the test decides."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """The time that the test has set."""
        return self.time
