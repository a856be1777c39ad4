"""Ordering keys that one term leaves unread for a while, and then tries again by itself.

A key is held back where nothing is wrong with its rows: their topic is away, or is still being looked up. It is also
held back where Postgres refuses to park or dead-letter its bad row. Unlike a parked key, only the term knows of it.
The next leader may forget it: it reads the key from its first row on and comes to the same decision.
"""

from __future__ import annotations

from collections.abc import Mapping

from outbox_plugin.core.ordering_key import OrderingKey

# After each release, the table is read from its beginning. So keys whose times end within this time are released
# together. If it were longer, keys of more and more new topics would be held.
MERGED_SECONDS = 0.25


class HeldKeys:
    """The ordering keys that are held back now. Times are seconds of the relay's clock."""

    def __init__(self) -> None:
        self._until: dict[OrderingKey, float] = {}
        self._earliest = 0.0
        self._not_before = 0.0

    @property
    def keys(self) -> frozenset[OrderingKey]:
        """The keys that are held back."""
        return frozenset(self._until)

    def hold(self, until: Mapping[OrderingKey, float]) -> None:
        """Hold keys back, each until its time."""
        self._until |= until
        self._earliest = min(self._until.values(), default=0.0)

    def release(self, now: float) -> bool:
        """Release the keys whose time is over. Returns whether there was one; read its rows again then."""
        if not self._until or now < max(self._earliest, self._not_before):
            return False
        self._until = {key: until for key, until in self._until.items() if until > now}
        self._earliest = min(self._until.values(), default=0.0)
        self._not_before = now + MERGED_SECONDS
        return True
