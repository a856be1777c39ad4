"""Lanes that one term holds back for a while, and lets go on by itself.

A lane is held back where nothing is wrong with its rows (their topic is away, or is still being looked up), and where a
bad row could not be put aside because the database refused to. Unlike a parked lane, it is known to the term alone. The
next leader may forget it: it reads the lane from its first row on, and comes to the same decision by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from outbox_plugin.core.lanes import Lane

# Each time that lanes are let go on, the table is walked from its beginning. So those whose times are over soon after
# one another go on together. Longer waits would let the lanes of ever new topics pile up.
MERGED_SECONDS = 0.25


class HeldLanes:
    """The lanes that are held back now."""

    def __init__(self) -> None:
        self._until: dict[Lane, float] = {}  # Seconds of the relay's clock.
        self._earliest = 0.0
        self._not_before = 0.0

    @property
    def lanes(self) -> frozenset[Lane]:
        """The lanes that are held back."""
        return frozenset(self._until)

    def hold(self, lanes: Mapping[Lane, float]) -> None:
        """Hold `lanes` back, each until the clock says so much, in seconds."""
        self._until |= lanes
        self._earliest = min(self._until.values(), default=0.0)

    def release(self, now: float) -> bool:
        """Let those go on whose time is over. Returns whether there was one: its rows are to be read again."""
        if not self._until or now < max(self._earliest, self._not_before):
            return False
        self._until = {lane: until for lane, until in self._until.items() if until > now}
        self._earliest = min(self._until.values(), default=0.0)
        self._not_before = now + MERGED_SECONDS
        return True
