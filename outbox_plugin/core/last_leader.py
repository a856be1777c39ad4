"""Whether a shard's last leader has resigned: what a harvester learns from the last records of the leader topic.

A harvester that has just started would otherwise have to listen for a while before it may assume that nobody leads.
"""

from __future__ import annotations

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat

TAIL_HEARTBEATS = 64  # Per partition. So many come in a few seconds while somebody leads, however many stand by.


class LastLeader:
    """Takes in the last heartbeats of one shard that others sent before this harvester started, in their order."""

    def __init__(self) -> None:
        """Nothing has been taken in."""
        self._leader: str | None = None  # The leader id of the last leader that has not resigned.
        self._has_resigned = False

    def take(self, heartbeat: LeaderHeartbeat) -> None:
        """Take in the next heartbeat."""
        if heartbeat.phase in ("candidate", "leader"):
            self._has_resigned = False
        if heartbeat.phase == "leader":
            self._leader = heartbeat.leader_id
        elif heartbeat.phase == "resigned" and self._leader in (None, heartbeat.leader_id):
            self._leader, self._has_resigned = None, not heartbeat.successor

    @property
    def has_resigned(self) -> bool:
        """Whether the last leader has resigned, in nobody's favour, and nobody has led since."""
        return self._has_resigned
