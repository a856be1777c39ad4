"""Which heartbeats are new, and which are copies of earlier ones that somebody has written again.

A copy of a heartbeat has a valid signature. Written again and again, it could make a dead leader seem alive, or a live
one seem to have resigned. Two numbers, which the signature covers, tell a copy from its original:

`beat` counts the heartbeats of an instance. A listener takes each number of an instance once, in ascending order. So
who listened while the original was written is deceived by no copy of it.

`after` is the offset that the sender had heard last from the partition. An original stands a few offsets behind it. A
copy stands further behind with every record that is written, itself included. A listener ignores heartbeats that stand
more than `COPY_OFFSETS` behind. So a harvester that begins to listen when a leader is dead already can be made to wait
for as many copies as that, not for ever. Offsets serve as the clock: no two hosts need agree on the time.

A harvester hears its own heartbeats however far behind they stand. No copy can deceive it about these, as it has used
its instance's name for nothing before.
"""

from __future__ import annotations

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat

COPY_OFFSETS = 256  # Far more than harvesters write to a partition while a heartbeat is on its way.
REMEMBERED_INSTANCES = 10_000  # A bound for memory; a copy of one that was forgotten is still bound by its offset.


class CopyFilter:
    """What one listener has heard so far, in all partitions of the leader topic."""

    def __init__(self, own_instance: str | None = None) -> None:
        """`own_instance` is the listener's own, if it sends heartbeats itself."""
        self._own_instance = own_instance
        self._last_beats: dict[tuple[str, int], int] = {}  # By instance and shard.
        self._ends: dict[int, int] = {}

    def end(self, shard: int) -> int:
        """The offset that was heard last from the shard's partition; -1 if none was."""
        return self._ends.get(shard, -1)

    def passed(self, shard: int, offset: int) -> None:
        """A record was read from the shard's partition, whoever wrote it."""
        self._ends[shard] = offset

    def is_new(self, heartbeat: LeaderHeartbeat, offset: int) -> bool:
        """Take in an authentic heartbeat that stands at `offset`; whether it is new."""
        if heartbeat.instance != self._own_instance and offset - heartbeat.after > COPY_OFFSETS:
            return False
        sender = heartbeat.instance, heartbeat.shard
        last = self._last_beats.pop(sender, 0)
        self._last_beats[sender] = max(last, heartbeat.beat)  # The latest sender stands last.
        if len(self._last_beats) > REMEMBERED_INSTANCES:
            del self._last_beats[next(iter(self._last_beats))]
        return heartbeat.beat > last
