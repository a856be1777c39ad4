"""Plans when an instance claims, asks for and releases partitions: `claims.plan`, with a memory of earlier attempts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from outbox_plugin.coordination.claims import Plan, plan
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.partition_owners import Holder
from outbox_plugin.core.topic_partition import TopicPartition

ROUND_SECONDS = 0.2  # Between two plans.
# After a plan in which nothing was to be done, the next one comes later by ROUND_SECONDS for each so many partitions.
PARTITIONS_PER_ROUND = 2_000
AVOIDED_INTERVALS = 10  # How long an instance first leaves a partition alone that it was too slow for; then twice that.
LONGEST_AVOIDED = 16 * AVOIDED_INTERVALS


class ClaimPlanner:
    """What to claim and release next. Times are monotonic seconds."""

    def __init__(self, me: Holder, timing: HeartbeatTiming, limit: int | None) -> None:
        """Nothing is claimed yet.

        Args:
            me: this instance, as the world knows it.
            timing: of the group's heartbeats.
            limit: how many partitions this instance may hold; None for any number.
        """
        self._me = me
        self._timing = timing
        self._limit = limit
        self._waiting: dict[TopicPartition, float] = {}  # When each claim was sent that the log has not answered yet.
        self._refused: dict[TopicPartition, float] = {}  # Until when a claim that did not count is not repeated.
        self._free_since: dict[TopicPartition, float] = {}
        self._avoid: dict[TopicPartition, float] = {}
        self._avoided = float(AVOIDED_INTERVALS)
        self._next = float("-inf")

    @property
    def patience(self) -> float:
        """The seconds after which an unanswered claim is made again."""
        return 2 * self._timing.interval

    def _neglect(self, last: Holder | None, *, others_ask: bool) -> float:
        """The seconds after which this instance claims a free partition, whatever its share.

        The partition may be in the share of an instance that died and is not stale yet. So it waits for three
        intervals at most: its last holder is stale after two. Where another instance asks for partitions, or this one
        has given up the partition for another, its claim may take a while, and whoever comes first only has to give the
        partition up again. If that other one dies, the partition waits for up to two intervals more.

        Args:
            last: the instance that released the partition itself, if one did.
            others_ask: whether another live instance asks for more partitions than it has.
        """
        return self.patience if others_ask or last == self._me else self._timing.beat

    def wait_for(self, tp: TopicPartition, now: float) -> None:
        """A claim on `tp` was sent."""
        self._waiting[tp] = now

    def answered(self, tp: TopicPartition, now: float, *, counted: bool) -> None:
        """The log has answered a claim.

        Args:
            tp: the partition that was claimed.
            now: the time.
            counted: whether the claim came first.
        """
        self._waiting.pop(tp, None)
        if counted:
            self._refused.pop(tp, None)
        else:
            self._refused[tp] = now + self._timing.beat

    def avoid(self, tp: TopicPartition, now: float) -> None:
        """This instance was too slow for `tp`."""
        self._avoid[tp] = now + self._avoided * self._timing.interval
        self._avoided = min(2 * self._avoided, LONGEST_AVOIDED)

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next plan."""
        self._waiting = {tp: since for tp, since in self._waiting.items() if now - since < self.patience}
        return now >= self._next and not self._waiting

    def next_plan(
        self,
        holders: Mapping[TopicPartition, Holder | None],
        members: Mapping[Holder, bool],
        left_by: Callable[[TopicPartition], Holder | None],
        now: float,
        *,
        unclear: Collection[TopicPartition] = (),
    ) -> Plan:
        """The plan for now.

        Args:
            holders: who holds each partition.
            members: the live instances, and whether each asks for more than it has.
            left_by: the instance that released a free partition itself.
            now: the time.
            unclear: partitions that we must not claim, because the log and the brokers name different topics.
        """
        free = [tp for tp, holder in holders.items() if holder is None]
        self._free_since = {tp: self._free_since.get(tp, now) for tp in free}
        self._avoid = {tp: until for tp, until in self._avoid.items() if now < until}
        self._refused = {tp: until for tp, until in self._refused.items() if now < until}
        held = dict.fromkeys([self._me, *members], 0)
        for holder in holders.values():
            if holder is not None:
                held[holder] = held.get(holder, 0) + 1
        others_ask = any(asks for member, asks in members.items() if member != self._me)
        neglected = {
            tp for tp in free if now - self._free_since[tp] > self._neglect(left_by(tp), others_ask=others_ask)
        }
        if not self._avoid and not neglected:
            fair = len(holders) // max(1, len(held))
            left = ((tp, left_by(tp)) for tp in free)
            given_up = [each for each, by in left if by and by in members and by != self._me and held[by] < fair]
            neglected = set(sorted(given_up)[:1])
        todo = plan(self._me, holders, members, limit=self._limit, neglected=neglected, avoid={*self._avoid, *unclear})
        todo = todo._replace(claim=tuple(tp for tp in todo.claim if tp not in self._refused and tp not in unclear))
        self._next = now
        if todo.ask is not None:
            self._next += self._timing.beat  # All have read the request; give the holder time to act.
        elif not todo.claim:
            self._next += ROUND_SECONDS * (1 + len(holders) / PARTITIONS_PER_ROUND)
        return todo
