"""What an instance holds, and what it says in the log: a state machine without I/O, threads or a clock.

All that changes what we hold is here. The log alone takes a claim away: that our heartbeats look old, because the
interpreter was held or the process was stopped, only makes the claim uncertain. Nothing is handed out then, and nothing
is dropped, until the log has answered.

Each claim has a lease. A message of ours that counted was appended after we sent it, and nobody else's claim can count
for two intervals after that; so the lease ends two intervals after we sent it, by our own monotonic clock. No wall
clock decides anything: the time of the log is what the broker stamped on the latest message, and what has passed since.

What an edge has to do: `apply` each entry of the log, `tick` often, carry out what `take` returns, in order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from outbox_plugin.coordination.actions import Action, Keep, Send
from outbox_plugin.coordination.claims import MAX_UNCOMMITTED, Claim
from outbox_plugin.coordination.events import ClaimGained, ClaimLost
from outbox_plugin.coordination.fetched import Answer
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.held_partition import NEVER, HeldPartition, UnansweredMessages
from outbox_plugin.coordination.lag_trend import LagTrend, left_to_others
from outbox_plugin.coordination.messages import (
    VERSION,
    ClaimingMessages,
    ClaimingPartition,
    Entry,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    coordination_partition,
)
from outbox_plugin.coordination.spread import Spread
from outbox_plugin.coordination.world import STALE_INTERVALS, TOPIC_CLIENT, Holder, Key, World
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import UserError


class TopicForm(NamedTuple):
    """A consumed topic, as the broker describes it."""

    partitions: int
    topic_id: str


class Member:
    """What `me` holds of `topics` in `group_id`. Not for two threads at once."""

    def __init__(
        self,
        me: Holder,
        group_id: str,
        topics: Sequence[str],
        timing: HeartbeatTiming,
        *,
        width: int,
        since: float,
        log_time: float,
        now: float,
        at_most_once: bool,
        limit: int | None,
    ) -> None:
        """Begin with nothing.

        Args:
            me: this run of its client.
            group_id: who shares the topics.
            topics: what to consume.
            timing: how often instances speak.
            width: the partitions of the coordination topic that count.
            since: when the part of the log begins that is read (seconds since the epoch).
            log_time: the log's time at `now`.
            now: monotonic seconds, here and everywhere.
            at_most_once: hand out only what the log has promised.
            limit: how many partitions to hold at most.
        """
        self.me = me
        self._group = group_id
        self._timing = timing
        self._at_most_once = at_most_once
        self._limit = limit
        self._ahead = log_time - now
        self._stamp = 0
        self._partition_of = {topic: coordination_partition(topic, width) for topic in topics}
        self.worlds = {each: World(timing.interval, since=since) for each in self._partition_of.values()}
        self._read_up_to = dict.fromkeys(self.worlds, -1)
        self._forms: dict[str, TopicForm] = {}
        self._held: dict[TopicPartition, HeldPartition] = {}
        self._gained_of: dict[TopicPartition, str] = {}  # Ids of topics, by which we gained a partition.
        self._leaving: dict[TopicPartition, float] = {}  # Released, and not yet answered; since when.
        self._unanswered = UnansweredMessages()
        self._verdicts: dict[tuple[TopicPartition, int], bool | None] = {}
        self._spread = Spread(me, timing, limit)
        self._trend = LagTrend()
        self._handled = 0
        self._polled = now
        self._left = False
        self._actions: list[Action] = []

    # What an edge asks and tells.

    def take(self) -> list[Action]:
        """What is to be done now, in order."""
        actions, self._actions = self._actions, []
        return actions

    def log_time(self, now: float) -> float:
        """The log's own time."""
        return now + self._ahead

    def partitions(self) -> list[TopicPartition]:
        """All partitions that are to be consumed."""
        return [
            TopicPartition(topic, number) for topic, form in self._forms.items() for number in range(form.partitions)
        ]

    def remember(self, tp: TopicPartition, offset: int, topic_id: str, at: float) -> None:
        """Where the group goes on, as it was kept before the part of the log that is read."""
        if tp.topic in self._partition_of:
            self._world_of(tp).remember(Key(self._group, *tp), offset, topic_id, at)

    def caught_up(self) -> None:
        """All of the log that was there when we began was read."""
        for world in self.worlds.values():
            world.recall_all()

    def describe(self, forms: Mapping[str, TopicForm], now: float) -> None:
        """How the consumed topics look now. One that was made anew is begun anew, whatever was said before."""
        for topic, form in forms.items():
            former = self._forms.get(topic)
            anew = former is not None and former.topic_id != form.topic_id
            if former is not None and not anew:
                form = form._replace(partitions=max(former.partitions, form.partitions))
            self._forms[topic] = form
            for number in range(form.partitions):
                tp = TopicPartition(topic, number)
                known = self._world_of(tp).topic_id(self._group, *tp)
                if known != form.topic_id and (known or anew):
                    self._begin_anew(tp, form.topic_id, now)

    def held(self, now: float) -> dict[TopicPartition, Claim]:
        """What we certainly hold at `now`."""
        return {tp: held.claim for tp, held in self._held.items() if held.until > now}

    def claims(self) -> dict[TopicPartition, Claim]:
        """What we hold, or may still hold: to be fetched from."""
        return {tp: held.claim for tp, held in self._held.items()}

    def polled(self, now: float) -> None:
        """The user lives."""
        self._polled = now

    def may_hand_out(self, tp: TopicPartition, claim: Claim, offset: int, now: float) -> Answer:
        """Whether the record at `offset` may go to the user, by `claim`; if so it is noted that it did.

        Raises:
            UserError: too many records are handed out and not committed.
        """
        held = self._held.get(tp)
        if held is None or held.claim is not claim:
            return Answer.NEVER
        if offset < claim.position:
            return Answer.OLD
        if held.until <= now or (self._at_most_once and offset >= claim.promised):
            return Answer.NOT_YET
        if claim.uncommitted >= MAX_UNCOMMITTED:
            raise UserError(
                f"{MAX_UNCOMMITTED} records of partition {tp.partition} of {tp.topic} are handed out and not "
                "committed: commit what is done, or take guarantee='at-most-once'"
            )
        claim.hand_out(offset, keep=not self._at_most_once)
        self._handled += 1
        return Answer.YES

    def done(self, tp: TopicPartition, offset: int) -> bool:
        """The record at `offset` is done; whether we still hold its partition."""
        held = self._held.get(tp)
        if held is not None:
            held.claim.done(offset)
        return held is not None

    def ask_for_messages(self, ends: Mapping[TopicPartition, int], now: float) -> None:
        """Write to the log that we are about to hand out what is below each end (at-most-once)."""
        for tp, end in ends.items():
            self._verdicts[tp, end] = None
            self._say(tp, ClaimingMessages(*self._common(tp, now), end), now)

    def verdicts(self, ends: Mapping[TopicPartition, int]) -> dict[TopicPartition, bool | None]:
        """What the log has answered: None while it has not."""
        return {tp: self._verdicts.get((tp, end)) for tp, end in ends.items()}

    def forget_verdicts(self, ends: Mapping[TopicPartition, int]) -> None:
        """Nobody waits for these answers any more."""
        for each in ends.items():
            self._verdicts.pop(each, None)

    def offset_of(self, tp: TopicPartition) -> tuple[int, str]:
        """Where the log says that the group goes on, and the id of that topic."""
        known = self._world_of(tp).topic_id(self._group, *tp)
        return self._start_of(tp), known or self._gained_of.get(tp, "")

    def knows(self, tp: TopicPartition) -> bool:
        """Whether anybody said where the group goes on."""
        return self._world_of(tp).offset(self._group, *tp) is not None

    def wanted_ends(self, now: float) -> list[TopicPartition]:
        """The partitions whose ends `ends` should be told with the next heartbeats; none where nobody could help."""
        if not self._held or len(self._members(now)) < 2:
            self._trend.forget()
            return []
        return self.partitions() if self._trend.falls_behind else list(self._held)

    def ends(self, ends: Mapping[TopicPartition, int], now: float) -> None:
        """Where partitions end for readers of committed records: what we are too slow for is left to a faster one."""
        behind = self._trend.falls_behind
        self._trend.add(sum(max(0, ends.get(p, 0) - h.claim.position) for p, h in self._held.items()), self._handled)
        if not (behind and self._trend.falls_behind and len(ends) >= len(self.partitions())):
            return
        holders = {tp: self._owner(tp, now) for tp in ends}
        lags = {tp: max(0, end - self._start_of(tp)) for tp, end in ends.items()}
        tp = left_to_others(self.me, lags, holders, self._members(now))
        if tp is not None and tp in self._held:
            self._spread.avoid(tp, now)
            self._release([tp], "it fell behind, and another is faster", now)
        self._trend.forget()

    # What the log says.

    def apply(self, entry: Entry, now: float, *, live: bool = True) -> None:
        """Take in an entry; `live` unless it is one of those that were there when we began to read."""
        message = entry.message
        world = self.worlds.get(entry.partition)
        if world is None:
            return
        self._read_up_to[entry.partition] = entry.offset
        if live:
            self._ahead = entry.at - now
        if message.group_id != self._group:
            return
        if isinstance(message, ReleaseGroup):
            world.apply(message, entry.at)
            if self._held and world.paused(self._group, entry.at):
                self._release(list(self._held), "the group is paused", now)
            return
        if self._partition_of.get(message.topic) != entry.partition:
            return  # Nobody talks about it here.
        counted = world.apply(message, entry.at)
        tp = TopicPartition(message.topic, message.partition)
        held = self._held.get(tp)
        if (message.instance_id, message.client_id) == self.me:
            self._answered(tp, held, entry, counted, now)
        elif held is not None and world.latest_holder(self._group, *tp) != self.me:
            anew = message.client_id == TOPIC_CLIENT
            self._lose(tp, "the topic was made anew" if anew else "another instance holds it")

    def _answered(
        self, tp: TopicPartition, held: HeldPartition | None, entry: Entry, counted: bool, now: float
    ) -> None:
        """A message in our name has come back: what it was worth."""
        message = entry.message
        sent = self._unanswered.answer(tp, message.timestamp, now)
        if sent is None:
            if held is not None:
                self._repair(tp, held, now)
        elif isinstance(message, ClaimingMessages):
            if (tp, message.offset) in self._verdicts:
                self._verdicts[tp, message.offset] = counted
            if not counted and held is not None:
                self._lose(tp, "it was not ours when we asked for its messages")
        elif isinstance(message, ReleasingPartition):
            self._leaving.pop(tp, None)
            if held is not None:
                held.repaired, held.until = NEVER, NEVER
            if counted:
                self._keep(tp, message.offset, self.offset_of(tp)[1], entry.at)
        elif held is None:
            self._spread.answered(tp, now, counted=counted)
            if counted and tp not in self._leaving and not self._left:
                self._gain(tp, entry, sent, now)
        elif held.repaired > NEVER:
            pass  # What was said before the release that sets things right.
        elif counted:
            self._counted(tp, held, entry, sent, now)
        elif self._world_of(tp).latest_holder(self._group, *tp) == self.me:
            self._reclaim(tp, held, now)
        else:
            self._lose(tp, "a heartbeat came too late")

    def _counted(self, tp: TopicPartition, held: HeldPartition, entry: Entry, sent: float, now: float) -> None:
        held.until = max(held.until, sent + STALE_INTERVALS * self._timing.interval)
        if isinstance(entry.message, ClaimingPartition):
            if held.reclaimed > NEVER:
                held.reclaimed = NEVER
                self._beat(tp, held, now)
            return
        offset = self._start_of(tp)
        if held.kept is None or (held.kept != offset and now - held.kept_at >= self._timing.renewal):
            held.kept, held.kept_at = offset, now
            self._keep(tp, offset, self.offset_of(tp)[1], entry.at)

    def _reclaim(self, tp: TopicPartition, held: HeldPartition, now: float) -> None:
        """Claim what was ours until it became stale, and nobody else's since: we go on where we are."""
        if now - held.reclaimed >= self._timing.beat:
            held.reclaimed = now
            self._say(tp, ClaimingPartition(*self._common(tp, now)), now)

    def _repair(self, tp: TopicPartition, held: HeldPartition, now: float) -> None:
        """Somebody spoke in our name: say again where we are, and that we hold it."""
        if now - held.repaired > self._spread.patience:
            held.repaired, held.until = now, NEVER
            common = self._common(tp, now)
            self._say(tp, ClaimingPartition(*common), now)
            self._say(tp, ReleasingPartition(*common, self._offset(held.claim)), now)
            self._say(tp, ClaimingPartition(*common), now)

    def _gain(self, tp: TopicPartition, entry: Entry, sent: float, now: float) -> None:
        topic_id = self._forms[tp.topic].topic_id if tp.topic in self._forms else ""
        known = self._world_of(tp).topic_id(self._group, *tp)
        if known and topic_id and known != topic_id:
            self._begin_anew(tp, topic_id, now)
            return
        until = sent + STALE_INTERVALS * self._timing.interval
        held = self._held[tp] = HeldPartition(Claim(self._start_of(tp)), until, now)
        self._gained_of[tp] = topic_id
        self._trend.forget()
        self._actions.append(ClaimGained(tp, held.claim.position, entry.offset))
        self._beat(tp, held, now)

    def _begin_anew(self, tp: TopicPartition, topic_id: str, now: float) -> None:
        common = (VERSION, self._timestamp(now), topic_id, TOPIC_CLIENT, self._group, *tp)
        self._actions.append(Send(ReleasingPartition(*common, 0), self._partition_of[tp.topic]))

    # What time brings.

    def resume(self, now: float) -> None:
        """Go on with what a former instance of our client holds."""
        room = len(self.partitions()) if self._limit is None else self._limit
        for tp in self.partitions():
            owner = self._owner(tp, now)
            if room > 0 and owner is not None and owner.client_id == self.me.client_id:
                room -= 1
                self._spread.wait_for(tp, now)
                self._say(tp, Heartbeat(*self._common(tp, now), self._start_of(tp)), now)

    def tick(self, now: float) -> None:
        """Beat, claim, ask and release as it is time for."""
        for tp, held in list(self._held.items()):
            if held.repaired > NEVER:
                self._repair(tp, held, now)
            elif now - held.beaten >= self._timing.beat:
                self._beat(tp, held, now)
        if self._spread.is_due(now):
            self._round(now)

    def _beat(self, tp: TopicPartition, held: HeldPartition, now: float) -> None:
        held.beaten = now
        if now - held.renewed > self._timing.renewal:
            held.renewed = now
            self._say(tp, ClaimingPartition(*self._common(tp, now)), now)
        self._say(tp, Heartbeat(*self._common(tp, now), self._offset(held.claim)), now)

    def _round(self, now: float) -> None:
        """Claim, ask and release as the plan says; nothing while the group is paused or nobody polls."""
        if any(world.paused(self._group, self.log_time(now)) for world in self.worlds.values()):
            self._release(list(self._held), "the group is paused", now)
            return
        if now - self._polled > self._timing.idle:
            self._release(list(self._held), f"nobody polled for {self._timing.idle:.0f} s", now)
            return
        self._leaving = {tp: since for tp, since in self._leaving.items() if now - since < self._spread.patience}
        holders = {tp: self.me if tp in self._held else self._owner(tp, now) for tp in self.partitions()}
        if not holders or self._left:
            return
        for tp, holder in holders.items():
            if holder == self.me and tp not in self._held and tp not in self._leaving:
                self._say_released(tp, self._start_of(tp), now)  # The log did not get it the first time.
        todo = self._spread.next_plan(holders, self._members(now), self._left_by, now)
        self._release([tp for tp in todo.release if tp in self._held], "others have room for it", now)
        for tp in todo.claim:
            if tp not in self._leaving:
                self._spread.wait_for(tp, now)
                self._say(tp, ClaimingPartition(*self._common(tp, now)), now)
        if todo.ask is not None:
            self._say(todo.ask, ClaimingPartition(*self._common(todo.ask, now)), now)

    def leave(self, now: float, *, keep: bool) -> None:
        """Say how far we are, and release all, or `keep` it for the next instance of our client."""
        self._left = True
        for tp, held in list(self._held.items()) if keep else ():
            offset = held.claim.position if self._at_most_once else held.claim.offset
            self._say(tp, Heartbeat(*self._common(tp, now), offset), now)
            self._leaving[tp] = now
            self._lose(tp, "this run ends")
        self._release(list(self._held), "this run ends", now)

    @property
    def has_left(self) -> bool:
        """Whether the log has all that we said when we left."""
        return not self._unanswered

    def _release(self, partitions: Collection[TopicPartition], why: str, now: float) -> None:
        """Give up partitions: hand out no more of their records, and tell the log where to go on."""
        for tp in partitions:
            claim = self._held[tp].claim
            self._say_released(tp, claim.position if self._at_most_once else claim.offset, now)
            self._lose(tp, why)

    def _say_released(self, tp: TopicPartition, offset: int, now: float) -> None:
        self._leaving[tp] = now
        self._say(tp, ReleasingPartition(*self._common(tp, now), offset), now)

    def _lose(self, tp: TopicPartition, why: str) -> None:
        del self._held[tp]
        self._trend.forget()
        self._actions.append(ClaimLost(tp, self._read_up_to[self._partition_of[tp.topic]], why))

    def _keep(self, tp: TopicPartition, offset: int, topic_id: str, at: float) -> None:
        self._actions.append(Keep(tp, offset, topic_id, at))

    # What the world says.

    def _world_of(self, tp: TopicPartition) -> World:
        return self.worlds[self._partition_of[tp.topic]]

    def _owner(self, tp: TopicPartition, now: float) -> Holder | None:
        return self._world_of(tp).owner(self._group, *tp, self.log_time(now))

    def _left_by(self, tp: TopicPartition) -> Holder | None:
        return self._world_of(tp).left_by(self._group, *tp)

    def _start_of(self, tp: TopicPartition) -> int:
        """Where to go on; 0 where nobody said: the partition's first record."""
        return self._world_of(tp).offset(self._group, *tp) or 0

    def _offset(self, claim: Claim) -> int:
        return claim.promised if self._at_most_once else claim.offset

    def _members(self, now: float) -> dict[Holder, bool]:
        members: dict[Holder, bool] = {}
        for world in self.worlds.values():
            for holder, asks in world.members(self._group, self.log_time(now)).items():
                members[holder] = members.get(holder, False) or asks
        return members

    # What we say.

    def _say(self, tp: TopicPartition, message: Message, now: float) -> None:
        self._unanswered.add(tp, message.timestamp, now)
        self._actions.append(Send(message, self._partition_of[tp.topic]))

    def _timestamp(self, now: float) -> int:
        self._stamp = max(self._stamp, int(self.log_time(now)))
        return self._stamp

    def _common(self, tp: TopicPartition, now: float) -> tuple[int, int, str, str, str, str, int]:
        return (VERSION, self._timestamp(now), *self.me, self._group, *tp)
