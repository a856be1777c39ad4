"""Which harvester leads which shard, as far as their heartbeats say, and whether the shards are spread evenly."""

from __future__ import annotations

from collections import Counter

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat

FRESH_SECONDS = 3.0  # Who was heard longer ago leads no shard any more.


class ShardLeaders:
    """The leaders of an outbox's shards. No clock of its own: `now` is in monotonic seconds of this process."""

    def __init__(self) -> None:
        self._leaders: dict[int, str] = {}  # The instance that was last heard to lead each shard.
        self._led: Counter[str] = Counter()  # How many shards each of them leads.
        self._heard_at: dict[str, float] = {}  # When each of them was last heard.

    def receive(self, heartbeat: LeaderHeartbeat, now: float) -> None:
        """Take in a heartbeat of any shard, from any harvester, our own included."""
        last = self._leaders.get(heartbeat.shard)
        if heartbeat.phase == "leader":
            self._heard_at[heartbeat.instance] = now
            if last != heartbeat.instance:
                self._remove(heartbeat.shard)
                self._leaders[heartbeat.shard] = heartbeat.instance
                self._led[heartbeat.instance] += 1
        elif heartbeat.phase == "resigned" and last == heartbeat.instance:
            self._remove(heartbeat.shard)

    def _remove(self, shard: int) -> None:
        if (leader := self._leaders.pop(shard, None)) is None:
            return
        self._led[leader] -= 1
        if not self._led[leader]:
            del self._led[leader], self._heard_at[leader]

    def would_be_more_even(self, shard: int, instance: str, now: float) -> bool:
        """Whether the shards would be spread more evenly, now or in a few moves, if `instance` led this shard.

        It may lead one shard less than the leader. Then a move changes nothing by itself, but may have to come first:
        where three lead 3, 2 and 1, and the first leads a shard of the second, and the second one of the third. Every
        move brings a shard to its owner, so the moves come to an end, and it is even there.

        Args:
            shard: The shard's number, from 0.
            instance: The harvester that might lead it.
            now: Monotonic seconds of this process.
        """
        leader = self._leaders.get(shard)
        if leader is None or not self._is_fresh(leader, now):
            return False
        gap = self._led[leader] - self._led[instance]
        return gap > 1 or (gap == 1 and self._is_uneven(instance, now))

    def _is_uneven(self, instance: str, now: float) -> bool:
        """Whether anybody leads at least two shards more than another. `instance` counts, even if it leads none."""
        led = [count for leader, count in self._led.items() if self._is_fresh(leader, now)]
        return max(led, default=0) - min([*led, self._led[instance]]) > 1

    def _is_fresh(self, leader: str, now: float) -> bool:
        return now - self._heard_at[leader] <= FRESH_SECONDS
