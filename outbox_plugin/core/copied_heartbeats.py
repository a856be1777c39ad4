"""Which heartbeats are new, and which are copies of earlier ones that somebody has written again.

A copy of a heartbeat has a valid signature. Written again and again, it could make a dead leader seem alive, or a live
one seem to have resigned. Two numbers, which the signature covers, tell a copy from its original:

`beat` counts the heartbeats of an instance. A listener accepts each number of an instance once, in ascending order. So
a copy does not deceive a listener that has heard the original.

`after` is the offset that the sender had heard last from the partition. An original stands a few offsets behind it. A
copy stands further behind with every record that is written, itself included. A listener ignores heartbeats that stand
more than `COPY_OFFSETS` behind. So a harvester that begins to listen after a leader has died may be made to wait, but
only for so many copies. Offsets serve as the clock, so hosts need not agree on the time.

A harvester accepts its own heartbeats however far behind they stand. No earlier copies of these exist, because the name
of its instance is new.
"""

from __future__ import annotations

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat

COPY_OFFSETS = 256  # Far more than harvesters write to a partition while a heartbeat is on its way.
REMEMBERED_INSTANCES = 10_000  # Bounds the memory. `after` still bounds copies of heartbeats of a forgotten instance.


class CopyFilter:
    """Remembers what one listener has heard, in all partitions of the leader topic."""

    def __init__(self, own_instance: str | None = None) -> None:
        """Nothing has been heard yet. `own_instance` is the listener's instance, if it sends heartbeats itself."""
        self._own_instance = own_instance
        self._last_beats: dict[tuple[str, int], int] = {}  # By instance and shard.
        self._ends: dict[int, int] = {}

    def end(self, shard: int) -> int:
        """The offset that was heard last from the shard's partition; -1 if none was."""
        return self._ends.get(shard, -1)

    def passed(self, shard: int, offset: int) -> None:
        """Take in that a record was read from the shard's partition, whoever wrote it."""
        self._ends[shard] = offset

    def is_new(self, heartbeat: LeaderHeartbeat, offset: int) -> bool:
        """Take in an authentic heartbeat that stands at `offset`. Returns whether it is new."""
        if heartbeat.instance != self._own_instance and offset - heartbeat.after > COPY_OFFSETS:
            return False
        sender = heartbeat.instance, heartbeat.shard
        last = self._last_beats.pop(sender, 0)
        self._last_beats[sender] = max(last, heartbeat.beat)  # The sender heard last stands last.
        if len(self._last_beats) > REMEMBERED_INSTANCES:
            del self._last_beats[next(iter(self._last_beats))]
        return heartbeat.beat > last
