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
        self._leader: str | None = None  # The leader id of the last leader, until it resigns.
        self._candidate: str | None = None  # That of the last candidate, until it leads or resigns.
        self._former: set[str] = set()  # Those of earlier leaders. What they still say counts for nothing.
        self._has_resigned = False

    def take(self, heartbeat: LeaderHeartbeat) -> None:
        """Take in the next heartbeat."""
        leader_id = heartbeat.leader_id
        if leader_id in self._former:
            return
        match heartbeat.phase:
            case "candidate":
                self._candidate = leader_id
            case "leader":
                self._leads(leader_id)
            case "resigned":
                self._resigns(leader_id, heartbeat.successor)
            case _:
                pass

    def _leads(self, leader_id: str) -> None:
        if self._leader not in (None, leader_id):
            self._former.add(self._leader)
        if self._candidate == leader_id:
            self._candidate = None
        self._leader, self._has_resigned = leader_id, False

    def _resigns(self, leader_id: str, successor: str) -> None:
        if self._candidate == leader_id:
            self._candidate = None
        if self._leader in (None, leader_id):  # Else it was a candidate.
            self._former.add(leader_id)
            self._leader, self._has_resigned = None, not successor

    @property
    def has_resigned(self) -> bool:
        """Whether the last leader has resigned, in nobody's favour, and nobody leads or takes over."""
        return self._has_resigned and self._candidate is None
