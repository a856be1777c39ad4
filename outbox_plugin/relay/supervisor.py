"""The harvester's main loop: hears the leader topic and lets every shard act on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from outbox_plugin.core.heartbeat import Heartbeat
from outbox_plugin.core.ports import Membership
from outbox_plugin.core.progress import Identity
from outbox_plugin.errors import ForeignOutbox
from outbox_plugin.relay.shard import Shard

LISTEN_SECONDS = 0.1
HAND_OVER_SECONDS = 10.0


class Supervisor:
    """Runs the shards of one outbox on one thread, the caller's."""

    def __init__(
        self, membership: Membership, shards: Sequence[Shard], identity: Identity, clock: Callable[[], float]
    ) -> None:
        """`clock` gives monotonic seconds."""
        self._membership = membership
        self._shards = {shard.number: shard for shard in shards}
        self._identity = identity
        self._clock = clock

    def run(self, stop: threading.Event) -> None:
        """Follow and lead until `stop` is set, then hand everything over.

        Raises:
            ForeignOutbox: harvesters of another outbox use our group, and were there first.
        """
        try:
            while not stop.is_set():
                self._turn()
        finally:
            self._hand_over()

    def _turn(self) -> None:
        owned = self._membership.owned()
        for shard in self._shards.values():
            shard.election.owns(shard.number in owned)
        for heartbeat in self._membership.heard(LISTEN_SECONDS):
            heard_by = self._shards.get(heartbeat.shard)
            if heard_by is not None and self._is_ours(heartbeat, heard_by):
                heard_by.election.heard(heartbeat, self._clock())
        for shard in self._shards.values():
            shard.step(self._clock())

    def _is_ours(self, heartbeat: Heartbeat, shard: Shard) -> bool:
        """Whether the heartbeat is for the same outbox; an old incarnation's leader will notice by itself."""
        if heartbeat.place == self._identity.place:
            return True
        if shard.election.leader_id is None and heartbeat.phase == "leader":
            raise ForeignOutbox(
                f"the group is in use for another outbox, {heartbeat.place}, by {heartbeat.instance}; this one is "
                f"{self._identity.place}. Give it an OUTBOX_GROUP of its own"
            )
        return False

    def _hand_over(self) -> None:
        for shard in self._shards.values():
            shard.stop()
        for shard in self._shards.values():
            shard.hand_over(self._clock(), HAND_OVER_SECONDS)
        self._membership.leave(timeout_seconds=1.0)
