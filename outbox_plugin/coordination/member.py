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
from outbox_plugin.coordination.claims import MOST_UNCOMMITTED, Claim, Place
from outbox_plugin.coordination.events import ClaimGained, ClaimLost
from outbox_plugin.coordination.fetched import Answer
from outbox_plugin.coordination.held import NEVER, Held, Unanswered
from outbox_plugin.coordination.lag import LagTrend, left_to_others
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
from outbox_plugin.coordination.timing import Timing
from outbox_plugin.coordination.world import STALE_INTERVALS, TOPIC_CLIENT, Holder, Key, World
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
        timing: Timing,
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
        self._held: dict[Place, Held] = {}
        self._gained_of: dict[Place, str] = {}  # Ids of topics, by which we gained a partition.
        self._leaving: dict[Place, float] = {}  # Released, and not yet answered; since when.
        self._unanswered = Unanswered()
        self._verdicts: dict[tuple[Place, int], bool | None] = {}
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

    def places(self) -> list[Place]:
        """All partitions that are to be consumed."""
        return [Place(topic, number) for topic, form in self._forms.items() for number in range(form.partitions)]

    def remember(self, place: Place, offset: int, topic_id: str, at: float) -> None:
        """Where the group goes on, as it was kept before the part of the log that is read."""
        if place.topic in self._partition_of:
            self._world_of(place).remember(Key(self._group, *place), offset, topic_id, at)

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
                place = Place(topic, number)
                known = self._world_of(place).topic_id(self._group, *place)
                if known != form.topic_id and (known or anew):
                    self._begin_anew(place, form.topic_id, now)

    def held(self, now: float) -> dict[Place, Claim]:
        """What we certainly hold at `now`."""
        return {place: held.claim for place, held in self._held.items() if held.until > now}

    def claims(self) -> dict[Place, Claim]:
        """What we hold, or may still hold: to be fetched from."""
        return {place: held.claim for place, held in self._held.items()}

    def polled(self, now: float) -> None:
        """The user lives."""
        self._polled = now

    def may_hand_out(self, place: Place, claim: Claim, offset: int, now: float) -> Answer:
        """Whether the record at `offset` may go to the user, by `claim`; if so it is noted that it did.

        Raises:
            UserError: too many records are handed out and not committed.
        """
        held = self._held.get(place)
        if held is None or held.claim is not claim:
            return Answer.NEVER
        if offset < claim.position:
            return Answer.OLD
        if held.until <= now or (self._at_most_once and offset >= claim.promised):
            return Answer.NOT_YET
        if claim.uncommitted >= MOST_UNCOMMITTED:
            raise UserError(
                f"{MOST_UNCOMMITTED} records of partition {place.partition} of {place.topic} are handed out and not "
                "committed: commit what is done, or take guarantee='at-most-once'"
            )
        claim.hand_out(offset, keep=not self._at_most_once)
        self._handled += 1
        return Answer.YES

    def done(self, place: Place, offset: int) -> bool:
        """The record at `offset` is done; whether we still hold its partition."""
        held = self._held.get(place)
        if held is not None:
            held.claim.done(offset)
        return held is not None

    def ask_for_messages(self, ends: Mapping[Place, int], now: float) -> None:
        """Write to the log that we are about to hand out what is below each end (at-most-once)."""
        for place, end in ends.items():
            self._verdicts[place, end] = None
            self._say(place, ClaimingMessages(*self._common(place, now), end), now)

    def verdicts(self, ends: Mapping[Place, int]) -> dict[Place, bool | None]:
        """What the log has answered: None while it has not."""
        return {place: self._verdicts.get((place, end)) for place, end in ends.items()}

    def forget_verdicts(self, ends: Mapping[Place, int]) -> None:
        """Nobody waits for these answers any more."""
        for each in ends.items():
            self._verdicts.pop(each, None)

    def offset_of(self, place: Place) -> tuple[int, str]:
        """Where the log says that the group goes on, and the id of that topic."""
        known = self._world_of(place).topic_id(self._group, *place)
        return self._start_of(place), known or self._gained_of.get(place, "")

    def knows(self, place: Place) -> bool:
        """Whether anybody said where the group goes on."""
        return self._world_of(place).offset(self._group, *place) is not None

    def wanted_ends(self, now: float) -> list[Place]:
        """The partitions whose ends `ends` should be told with the next heartbeats; none where nobody could help."""
        if not self._held or len(self._members(now)) < 2:
            self._trend.forget()
            return []
        return self.places() if self._trend.falls_behind else list(self._held)

    def ends(self, ends: Mapping[Place, int], now: float) -> None:
        """Where partitions end for readers of committed records: what we are too slow for is left to a faster one."""
        behind = self._trend.falls_behind
        self._trend.add(sum(max(0, ends.get(p, 0) - h.claim.position) for p, h in self._held.items()), self._handled)
        if not (behind and self._trend.falls_behind and len(ends) >= len(self.places())):
            return
        holders = {place: self._owner(place, now) for place in ends}
        lags = {place: max(0, end - self._start_of(place)) for place, end in ends.items()}
        place = left_to_others(self.me, lags, holders, self._members(now))
        if place is not None and place in self._held:
            self._spread.avoid(place, now)
            self._release([place], "it fell behind, and another is faster", now)
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
        place = Place(message.topic, message.partition)
        held = self._held.get(place)
        if (message.instance_id, message.client_id) == self.me:
            self._answered(place, held, entry, counted, now)
        elif held is not None and world.latest_holder(self._group, *place) != self.me:
            anew = message.client_id == TOPIC_CLIENT
            self._lose(place, "the topic was made anew" if anew else "another instance holds it")

    def _answered(self, place: Place, held: Held | None, entry: Entry, counted: bool, now: float) -> None:
        """A message in our name has come back: what it was worth."""
        message = entry.message
        sent = self._unanswered.answer(place, message.timestamp, now)
        if sent is None:
            if held is not None:
                self._repair(place, held, now)
        elif isinstance(message, ClaimingMessages):
            if (place, message.offset) in self._verdicts:
                self._verdicts[place, message.offset] = counted
            if not counted and held is not None:
                self._lose(place, "it was not ours when we asked for its messages")
        elif isinstance(message, ReleasingPartition):
            self._leaving.pop(place, None)
            if held is not None:
                held.repaired, held.until = NEVER, NEVER
            if counted:
                self._keep(place, message.offset, self.offset_of(place)[1], entry.at)
        elif held is None:
            self._spread.answered(place, now, counted=counted)
            if counted and place not in self._leaving and not self._left:
                self._gain(place, entry, sent, now)
        elif held.repaired > NEVER:
            pass  # What was said before the release that sets things right.
        elif counted:
            self._counted(place, held, entry, sent, now)
        elif self._world_of(place).latest_holder(self._group, *place) == self.me:
            self._reclaim(place, held, now)
        else:
            self._lose(place, "a heartbeat came too late")

    def _counted(self, place: Place, held: Held, entry: Entry, sent: float, now: float) -> None:
        held.until = max(held.until, sent + STALE_INTERVALS * self._timing.interval)
        if isinstance(entry.message, ClaimingPartition):
            if held.reclaimed > NEVER:
                held.reclaimed = NEVER
                self._beat(place, held, now)
            return
        offset = self._start_of(place)
        if held.kept is None or (held.kept != offset and now - held.kept_at >= self._timing.renewal):
            held.kept, held.kept_at = offset, now
            self._keep(place, offset, self.offset_of(place)[1], entry.at)

    def _reclaim(self, place: Place, held: Held, now: float) -> None:
        """Claim what was ours until it became stale, and nobody else's since: we go on where we are."""
        if now - held.reclaimed >= self._timing.beat:
            held.reclaimed = now
            self._say(place, ClaimingPartition(*self._common(place, now)), now)

    def _repair(self, place: Place, held: Held, now: float) -> None:
        """Somebody spoke in our name: say again where we are, and that we hold it."""
        if now - held.repaired > self._spread.patience:
            held.repaired, held.until = now, NEVER
            common = self._common(place, now)
            self._say(place, ClaimingPartition(*common), now)
            self._say(place, ReleasingPartition(*common, self._offset(held.claim)), now)
            self._say(place, ClaimingPartition(*common), now)

    def _gain(self, place: Place, entry: Entry, sent: float, now: float) -> None:
        topic_id = self._forms[place.topic].topic_id if place.topic in self._forms else ""
        known = self._world_of(place).topic_id(self._group, *place)
        if known and topic_id and known != topic_id:
            self._begin_anew(place, topic_id, now)
            return
        until = sent + STALE_INTERVALS * self._timing.interval
        held = self._held[place] = Held(Claim(self._start_of(place)), until, now)
        self._gained_of[place] = topic_id
        self._trend.forget()
        self._actions.append(ClaimGained(place, held.claim.position, entry.offset))
        self._beat(place, held, now)

    def _begin_anew(self, place: Place, topic_id: str, now: float) -> None:
        common = (VERSION, self._timestamp(now), topic_id, TOPIC_CLIENT, self._group, *place)
        self._actions.append(Send(ReleasingPartition(*common, 0), self._partition_of[place.topic]))

    # What time brings.

    def resume(self, now: float) -> None:
        """Go on with what a former instance of our client holds."""
        room = len(self.places()) if self._limit is None else self._limit
        for place in self.places():
            owner = self._owner(place, now)
            if room > 0 and owner is not None and owner.client_id == self.me.client_id:
                room -= 1
                self._spread.wait_for(place, now)
                self._say(place, Heartbeat(*self._common(place, now), self._start_of(place)), now)

    def tick(self, now: float) -> None:
        """Beat, claim, ask and release as it is time for."""
        for place, held in list(self._held.items()):
            if held.repaired > NEVER:
                self._repair(place, held, now)
            elif now - held.beaten >= self._timing.beat:
                self._beat(place, held, now)
        if self._spread.is_due(now):
            self._round(now)

    def _beat(self, place: Place, held: Held, now: float) -> None:
        held.beaten = now
        if now - held.renewed > self._timing.renewal:
            held.renewed = now
            self._say(place, ClaimingPartition(*self._common(place, now)), now)
        self._say(place, Heartbeat(*self._common(place, now), self._offset(held.claim)), now)

    def _round(self, now: float) -> None:
        """Claim, ask and release as the plan says; nothing while the group is paused or nobody polls."""
        if any(world.paused(self._group, self.log_time(now)) for world in self.worlds.values()):
            self._release(list(self._held), "the group is paused", now)
            return
        if now - self._polled > self._timing.idle:
            self._release(list(self._held), f"nobody polled for {self._timing.idle:.0f} s", now)
            return
        self._leaving = {place: since for place, since in self._leaving.items() if now - since < self._spread.patience}
        holders = {place: self.me if place in self._held else self._owner(place, now) for place in self.places()}
        if not holders or self._left:
            return
        for place, holder in holders.items():
            if holder == self.me and place not in self._held and place not in self._leaving:
                self._say_released(place, self._start_of(place), now)  # The log did not get it the first time.
        todo = self._spread.next_plan(holders, self._members(now), self._left_by, now)
        self._release([place for place in todo.release if place in self._held], "others have room for it", now)
        for place in todo.claim:
            if place not in self._leaving:
                self._spread.wait_for(place, now)
                self._say(place, ClaimingPartition(*self._common(place, now)), now)
        if todo.ask is not None:
            self._say(todo.ask, ClaimingPartition(*self._common(todo.ask, now)), now)

    def leave(self, now: float, *, keep: bool) -> None:
        """Say how far we are, and release all, or `keep` it for the next instance of our client."""
        self._left = True
        for place, held in list(self._held.items()) if keep else ():
            offset = held.claim.position if self._at_most_once else held.claim.offset
            self._say(place, Heartbeat(*self._common(place, now), offset), now)
            self._leaving[place] = now
            self._lose(place, "this run ends")
        self._release(list(self._held), "this run ends", now)

    @property
    def has_left(self) -> bool:
        """Whether the log has all that we said when we left."""
        return not self._unanswered

    def _release(self, places: Collection[Place], why: str, now: float) -> None:
        """Give up `places`: what was not handed out is handed out by us no more, and the log says where to go on."""
        for place in places:
            claim = self._held[place].claim
            self._say_released(place, claim.position if self._at_most_once else claim.offset, now)
            self._lose(place, why)

    def _say_released(self, place: Place, offset: int, now: float) -> None:
        self._leaving[place] = now
        self._say(place, ReleasingPartition(*self._common(place, now), offset), now)

    def _lose(self, place: Place, why: str) -> None:
        del self._held[place]
        self._trend.forget()
        self._actions.append(ClaimLost(place, self._read_up_to[self._partition_of[place.topic]], why))

    def _keep(self, place: Place, offset: int, topic_id: str, at: float) -> None:
        self._actions.append(Keep(place, offset, topic_id, at))

    # What the world says.

    def _world_of(self, place: Place) -> World:
        return self.worlds[self._partition_of[place.topic]]

    def _owner(self, place: Place, now: float) -> Holder | None:
        return self._world_of(place).owner(self._group, *place, self.log_time(now))

    def _left_by(self, place: Place) -> Holder | None:
        return self._world_of(place).left_by(self._group, *place)

    def _start_of(self, place: Place) -> int:
        """Where to go on; 0 where nobody said: the partition's first record."""
        return self._world_of(place).offset(self._group, *place) or 0

    def _offset(self, claim: Claim) -> int:
        return claim.promised if self._at_most_once else claim.offset

    def _members(self, now: float) -> dict[Holder, bool]:
        members: dict[Holder, bool] = {}
        for world in self.worlds.values():
            for holder, asks in world.members(self._group, self.log_time(now)).items():
                members[holder] = members.get(holder, False) or asks
        return members

    # What we say.

    def _say(self, place: Place, message: Message, now: float) -> None:
        self._unanswered.add(place, message.timestamp, now)
        self._actions.append(Send(message, self._partition_of[place.topic]))

    def _timestamp(self, now: float) -> int:
        self._stamp = max(self._stamp, int(self.log_time(now)))
        return self._stamp

    def _common(self, place: Place, now: float) -> tuple[int, int, str, str, str, str, int]:
        return (VERSION, self._timestamp(now), *self.me, self._group, *place)
