"""What an instance holds, and what it writes to the log: a state machine without I/O, threads or a clock.

All that changes what we hold is here; `group_view.py` answers questions about the log. Only the log takes a claim away.
If our heartbeats are old because the process was stopped for a while, a claim is uncertain: until the log has answered,
no record is returned to the user, and none is dropped.

Each claim has a lease. When a message of ours counts, the broker appended it after we sent it, and no other instance's
claim can count within two intervals of that. So the lease ends two intervals after we sent the message, by our own
monotonic clock. No wall clock decides anything: the log's time is the broker's timestamp of the latest message, plus
the time that has passed since.

`Instance` applies each entry of the log, calls `tick` often, and carries out the actions that `take` returns, in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from outbox_plugin.coordination.actions import KeepPosition, MemberAction, Send
from outbox_plugin.coordination.claim_planner import ClaimPlanner
from outbox_plugin.coordination.claims import MAX_UNCOMMITTED, Claim
from outbox_plugin.coordination.events import ClaimGained, ClaimLost
from outbox_plugin.coordination.fetch_buffer import MayHandOut
from outbox_plugin.coordination.group_view import GroupView, TopicForm
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
)
from outbox_plugin.coordination.partition_owners import REMEMBERED_TOPICS, STALE_INTERVALS, TOPIC_CLIENT, Holder, Key
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import UserError

FORMER_ID_ANSWERS = 8  # So many answers in a row must name a former topic before we believe them.


class _Release(NamedTuple):
    """When a release was sent, and its timestamp, which no unanswered earlier message of the partition has."""

    sent: float
    timestamp: int


class Member:
    """One instance of a group. Not safe for threads: `Instance` locks it."""

    def __init__(
        self,
        me: Holder,
        view: GroupView,
        timing: HeartbeatTiming,
        *,
        now: float,
        at_most_once: bool,
        limit: int | None,
    ) -> None:
        """Begin with nothing.

        Args:
            me: this run of its client.
            view: what the log says of the group.
            timing: how often instances write heartbeats.
            now: monotonic seconds, here and everywhere.
            at_most_once: hand out only what the log has promised.
            limit: how many partitions to hold at most.
        """
        self.me = me
        self.view = view
        self._group = view.group_id
        self._timing = timing
        self._at_most_once = at_most_once
        self._limit = limit
        self._stamp = 0
        self._read_up_to = dict.fromkeys(self.view.worlds, -1)
        self._held: dict[TopicPartition, HeldPartition] = {}
        # The partitions of recreated topics, until the log has the new ids; and the former ids that we were told.
        self._former_ids: dict[TopicPartition, tuple[str, ...]] = {}
        # When we wrote last that a topic was recreated, and for how long not again; until we read its part of the log.
        self._announced: dict[str, tuple[float, float]] = {}
        self._recreation_read_at: dict[str, float] = {}  # When we last read in the log that a topic was recreated.
        # The former id that the brokers name though we know a later one, since when, and in how many answers.
        self._outdated_topic_id: dict[str, tuple[str, float, int]] = {}
        self._topic_id_when_gained: dict[TopicPartition, tuple[str]] = {}  # The topic's id when we gained a partition.
        self._leaving: dict[TopicPartition, _Release] = {}  # The last release of a partition, until the log has it.
        self._unanswered = UnansweredMessages()
        self._verdicts: dict[tuple[TopicPartition, int], bool | None] = {}
        self._planner = ClaimPlanner(me, timing, limit)
        self._trend = LagTrend()
        self._handled = 0
        self._polled = now
        self._ran = now  # When we last read an entry, or wrote what was due.
        # The timestamp of our first message after a stall, by partition of the log, until we have read it there.
        self._stalled: dict[int, int] = {}
        self._left = False
        self._actions: list[MemberAction] = []
        self._to_keep: dict[TopicPartition, None] = {}  # Those whose positions are to be kept next, in order.

    # Called by `Instance`.

    def take(self) -> list[MemberAction]:
        """Return the actions to carry out, in order, and forget them."""
        actions, self._actions = self._actions, []
        # What the log says by now: of what we have just read, others may have said the last part.
        actions += map(self._position, self._to_keep)
        self._to_keep.clear()
        return actions

    def describe(self, forms: Mapping[str, TopicForm], now: float, *, asked: float | None = None) -> None:
        """Take in how the consumed topics look, as some broker says. A recreated topic is consumed from its beginning.

        A broker that is behind names a former topic. We believe that only if many answers over a long time say nothing
        else.

        Args:
            forms: the answers.
            now: the time.
            asked: when the brokers were asked, if it is not now. Since then, the log may have named a later topic.
        """
        self._notice_stall(now)
        for topic, form in forms.items():
            if asked is not None and asked < self._recreation_read_at.get(topic, NEVER):
                continue
            former = self.view.forms.get(topic, form)
            partitions = [TopicPartition(topic, n) for n in range(max(former.partitions, form.partitions))]
            if self._reject_outdated_topic_id(form.topic_id, partitions, now):
                continue
            if former.topic_id != form.topic_id:
                self._announced.pop(topic, None)
                # The new topic may get as many partitions as the former one had only later.
                for tp in partitions:
                    told = dict.fromkeys((former.topic_id, *self._former_ids.get(tp, ())))
                    told.pop(form.topic_id, None)
                    self._former_ids[tp] = (*told,)[:REMEMBERED_TOPICS]
                partitions = partitions[: form.partitions]
            self.view.forms[topic] = form._replace(partitions=len(partitions))
            may_announce = self._may_announce(topic, now)
            for tp in partitions:
                known = self.view.topic_ids(tp)
                if known[:1] == (form.topic_id,):
                    self._former_ids.pop(tp, None)
                elif known or tp in self._former_ids:  # Each time, until the log has it: the message may be lost.
                    before = known or self._former_ids.setdefault(tp, ())
                    if may_announce:
                        self._announce_recreation(tp, form.topic_id, before, now)

    def _reject_outdated_topic_id(self, topic_id: str, partitions: Sequence[TopicPartition], now: float) -> bool:
        """Count the answer of a broker that is behind: the log or another broker knows a later topic.

        Returns whether the answer does not count.

        Args:
            topic_id: the id that it has named.
            partitions: all of the topic.
            now: the time.
        """
        topic = partitions[0].topic
        if not any(topic_id in (*self.view.topic_ids(tp)[1:], *self._former_ids.get(tp, ())) for tp in partitions):
            self._outdated_topic_id.pop(topic, None)
            return False
        refused, since, answers = self._outdated_topic_id.get(topic, ("", now, 0))
        if refused != topic_id:
            since, answers = now, 0
        answers += 1
        self._outdated_topic_id[topic] = (topic_id, since, answers)
        return now - since < self._timing.lookback or answers < FORMER_ID_ANSWERS

    def _may_announce(self, topic: str, now: float) -> bool:
        """Whether to write that a topic was recreated. Each such message frees its partitions.

        So whoever cannot read the log, and does not see that it was heard, repeats it ever less often.
        """
        since, pause = self._announced.get(topic, (NEVER, 0.0))
        return now - since >= pause

    def held(self, now: float) -> dict[TopicPartition, Claim]:
        """The partitions whose lease has not ended at `now`."""
        return {tp: held.claim for tp, held in self._held.items() if held.until > now}

    def claims(self) -> dict[TopicPartition, Claim]:
        """The partitions that we hold or may still hold; they are fetched from."""
        return {tp: held.claim for tp, held in self._held.items()}

    @property
    def polled_at(self) -> float:
        """When the user last polled."""
        return self._polled

    @property
    def confirmed_at(self) -> float | None:
        """When the last message that counted was sent, of the partition whose is the oldest; None if none did."""
        leases = [held.until for held in self._held.values() if held.until > NEVER]
        return min(leases) - STALE_INTERVALS * self._timing.interval if leases else None

    def polled(self, now: float) -> None:
        """Note that the user polls."""
        self._polled = now

    def may_hand_out(self, tp: TopicPartition, claim: Claim, offset: int, now: float) -> MayHandOut:
        """Decide whether a record may go to the user, and count it as handed out if so.

        Args:
            tp: the record's partition.
            claim: the claim by which it was fetched.
            offset: the record's offset.
            now: monotonic seconds.

        Raises:
            UserError: too many records are handed out and not committed.
        """
        held = self._held.get(tp)
        if held is None or held.claim is not claim:
            return MayHandOut.NEVER
        if offset < claim.position:
            return MayHandOut.OLD
        if held.until <= now or (self._at_most_once and offset >= claim.promised):
            return MayHandOut.NOT_YET
        if claim.uncommitted >= MAX_UNCOMMITTED:
            raise UserError(
                f"{MAX_UNCOMMITTED} records of partition {tp.partition} of {tp.topic} are handed out and not "
                "committed: commit what is done, or take guarantee='at-most-once'"
            )
        claim.hand_out(offset, keep=not self._at_most_once)
        self._handled += 1
        return MayHandOut.YES

    def done(self, tp: TopicPartition, offset: int) -> bool:
        """Note that a record is done. Returns whether we still hold its partition."""
        held = self._held.get(tp)
        if held is not None:
            held.claim.done(offset)
        return held is not None

    def go_back(self, tp: TopicPartition, claim: Claim, offset: int, now: float) -> None:
        """Let the group go on at an offset, or before, because the partition's log was truncated below our position.

        A heartbeat cannot say that: it never moves a position back. At least once, we release the partition at the
        offset and claim it again, and repeat that until the log has it: nobody else knows of the truncation. At most
        once, we release it and say so once: what is said again may come late, and set back another instance.

        Args:
            tp: the partition.
            claim: with which it was fetched.
            offset: where the group goes on, at the latest.
            now: the time.
        """
        self._notice_stall(now)
        held = self._held.get(tp)
        if held is None or held.claim is not claim:
            return
        offset = min(offset, claim.offset)
        if self._at_most_once:
            self._say_released(tp, offset, now)
            self._lose(tp, "its log was truncated")
        else:
            held.claim, held.repaired = Claim(offset), NEVER
            self._trend.forget()
            self._repair(tp, held, now)

    def ask_for_messages(self, ends: Mapping[TopicPartition, int], now: float) -> None:
        """Write to the log that the records below each end will be handed out (at-most-once)."""
        for tp, end in ends.items():
            self._verdicts[tp, end] = None
            self._say(tp, ClaimingMessages(*self._common(tp, now), end), now)

    def verdicts(self, ends: Mapping[TopicPartition, int]) -> dict[TopicPartition, bool | None]:
        """Return whether the log has granted the records below each end; None while it has not answered."""
        return {tp: self._verdicts.get((tp, end)) for tp, end in ends.items()}

    def granted(self, claims: Mapping[TopicPartition, tuple[Claim, int]], now: float) -> list[KeepPosition]:
        """Return what to keep before the granted records below each end may be handed out.

        A partition whose lease has ended is left out. Another instance may hold it and may have kept a later position,
        which compaction would delete in favour of ours. A position that lies before the end is left out, too: the log
        granted an earlier request, which came late, and was set back since by a repair.
        """
        held = self.held(now)
        verdicts = self.verdicts({tp: end for tp, (_, end) in claims.items()})
        ours = [self._position(tp) for tp, (claim, _) in claims.items() if verdicts[tp] and held.get(tp) is claim]
        return [each for each in ours if each.offset >= claims[each.topic_partition][1]]

    def promise(self, claims: Mapping[TopicPartition, tuple[Claim, int]], kept: Collection[KeepPosition]) -> None:
        """Let the records be handed out whose positions are kept now, and forget the log's answers about all of them.

        While a position is being kept, its answer is still known: a repair must not go back behind it.

        Args:
            claims: what the log was asked for, as `granted` got it.
            kept: what `granted` returned; empty if it could not be kept.
        """
        now_held = self.claims()
        for each in kept:
            claim, end = claims[each.topic_partition]
            if now_held.get(each.topic_partition) is claim:
                claim.promise(end)
        for tp, (_, end) in claims.items():
            self._verdicts.pop((tp, end), None)

    def offset_of(self, tp: TopicPartition) -> tuple[int, tuple[str, ...]]:
        """Return the offset at which the group goes on by the log, and the ids of its topic and of those before it."""
        return self.view.start_of(tp), self.view.topic_ids(tp) or self._topic_id_when_gained.get(tp, ())

    def wanted_ends(self, now: float) -> list[TopicPartition]:
        """The partitions whose ends `ends` needs next; none while no other instance could help."""
        if not self._held or len(self.view.members(now)) < 2:
            self._trend.forget()
            return []
        return self.view.partitions() if self._trend.falls_behind else list(self._held)

    def ends(self, ends: Mapping[TopicPartition, int], now: float) -> None:
        """Take in where partitions end, and leave a partition to a faster instance if this one falls behind."""
        behind = self._trend.falls_behind
        self._trend.add(sum(max(0, ends.get(p, 0) - h.claim.position) for p, h in self._held.items()), self._handled)
        if not (behind and self._trend.falls_behind and len(ends) >= len(self.view.partitions())):
            return
        holders = {tp: self.view.owner(tp, now) for tp in ends}
        lags = {tp: max(0, end - self.view.start_of(tp)) for tp, end in ends.items()}
        tp = left_to_others(self.me, lags, holders, self.view.members(now))
        if tp is not None and tp in self._held:
            self._planner.avoid(tp, now)
            self._release([tp], "it fell behind, and another is faster", now)
        self._trend.forget()

    def apply(self, entry: Entry, now: float, *, live: bool = True) -> None:
        """Take in an entry of the log.

        Args:
            entry: the entry; entries of a partition come in their order.
            now: monotonic seconds.
            live: False for entries that were there when we began to read: their times do not set the log's time.
        """
        message = entry.message
        world = self.view.worlds.get(entry.partition)
        if world is None:
            return
        self._read_up_to[entry.partition] = entry.offset
        self.view.note_time(entry.partition, entry.at)
        if live:
            self._notice_stall(now)
            for topic in [topic for topic in self._announced if self.view.is_about(entry.partition, topic)]:
                del self._announced[topic]
            self.view.set_log_time(entry.at, now)
        if message.group_id != self._group:
            return
        if isinstance(message, ReleaseGroup):
            world.apply(message, entry.at)
            if self._held and world.paused(self._group, entry.at):
                self._release(list(self._held), "the group is paused", now)
            return
        if not self.view.is_about(entry.partition, message.topic):
            return  # Messages about the topic belong to another partition.
        counted = world.apply(message, entry.at)
        tp = TopicPartition(message.topic, message.partition)
        if counted and message.client_id == TOPIC_CLIENT:
            self._recreation_read_at[message.topic] = now
            # The new id is kept once somebody has claimed the partition. If it were kept now, and the log were lost, a
            # heartbeat that is on its way would count as a position in the new topic.
        if (message.instance_id, message.client_id) == self.me:
            self._answered(tp, entry, counted, now)
        elif tp in self._held and self.view.latest_holder(tp) != self.me:
            anew = message.client_id == TOPIC_CLIENT
            self._lose(tp, "the topic was recreated" if anew else "another instance holds it")

    def _answered(self, tp: TopicPartition, entry: Entry, counted: bool, now: float) -> None:
        """Take in a message of ours that has come back, and whether it counted."""
        message = entry.message
        sent = self._unanswered.answer(tp, message.timestamp, now)
        if sent is None:
            if (held := self._held.get(tp)) is not None:
                self._repair(tp, held, now)
            return
        if message.timestamp >= self._stalled.get(entry.partition, message.timestamp):
            self._stalled.pop(entry.partition, None)
        if isinstance(message, ClaimingMessages):
            self._messages_answered(tp, message.offset, counted)
        elif isinstance(message, ReleasingPartition):
            self._release_answered(tp, message.timestamp, sent, counted)
        else:
            self._claim_answered(tp, entry, counted, sent, now)

    def _messages_answered(self, tp: TopicPartition, end: int, counted: bool) -> None:
        """The log has the request for the records below `end`."""
        if (tp, end) in self._verdicts:
            self._verdicts[tp, end] = counted
        if not counted and tp in self._held:
            self._lose(tp, "it was not ours when we asked for its messages")

    def _release_answered(self, tp: TopicPartition, timestamp: int, sent: float, counted: bool) -> None:
        """The log has a release of ours: of a partition that we left, or one that corrects our claim."""
        if (last := self._leaving.get(tp)) is not None and timestamp >= last.timestamp:
            del self._leaving[tp]
        if (held := self._held.get(tp)) is not None:
            held.until = NEVER
            if counted and sent >= held.repaired:
                held.repaired = NEVER
        if counted:
            self._to_keep[tp] = None

    def _claim_answered(self, tp: TopicPartition, entry: Entry, counted: bool, sent: float, now: float) -> None:
        """The log has a claim or a heartbeat of ours."""
        if (held := self._held.get(tp)) is None:
            self._planner.answered(tp, now, counted=counted)
            if counted and tp not in self._leaving and not self._left:
                self._gain(tp, entry, sent, now)
        elif held.repaired > NEVER:
            pass  # It was written before the release that corrects our claim.
        elif counted:
            self._counted(tp, held, entry, sent, now)
        elif self.view.latest_holder(tp) == self.me:
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
        offset = self.view.start_of(tp)
        if held.kept is None or (held.kept != offset and now - held.kept_at >= self._timing.renewal):
            held.kept, held.kept_at = offset, now
            self._to_keep[tp] = None

    def _position(self, tp: TopicPartition) -> KeepPosition:
        return KeepPosition(tp, *self.offset_of(tp), self.view.time_of(Key(self._group, *tp)))

    def _reclaim(self, tp: TopicPartition, held: HeldPartition, now: float) -> None:
        """Claim a partition again that was ours until it became stale, and that nobody else has claimed since."""
        if now - held.reclaimed >= self._timing.beat and self._may_claim(tp):
            held.reclaimed = now
            self._say(tp, ClaimingPartition(*self._common(tp, now)), now)

    def _repair(self, tp: TopicPartition, held: HeldPartition, now: float) -> None:
        """Write our position and our claim again, because somebody else has written in our name."""
        # With at-least-once, it is repeated as often as a heartbeat: the partition must not become stale meanwhile.
        if now - held.repaired > (self._planner.patience if self._at_most_once else self._timing.beat):
            held.repaired, held.until = now, NEVER
            self._to_keep.pop(tp, None)  # The log says what we did not.
            if not self._may_claim(tp):
                return
            if not self._at_most_once:
                self._note_release(tp, now)  # If we lose the partition before, we gain it only behind the release.
            common = self._common(tp, now)
            self._say(tp, ClaimingPartition(*common), now)
            # The log may promise us more before it has this release, so it must not go back behind that.
            asked = (end for (each, end), counted in self._verdicts.items() if each == tp and counted is not False)
            self._say(tp, ReleasingPartition(*common, max(self._offset(held.claim), *asked, 0)), now)
            self._say(tp, ClaimingPartition(*common), now)

    def _is_offset_of_present_topic(self, tp: TopicPartition) -> bool:
        """Whether the log's offset belongs to the topic that the brokers describe.

        Not while we are told that the topic was recreated, and the log has no id of it yet.
        """
        is_unnamed = tp in self._former_ids and not self.view.topic_id(tp)
        return self.view.topic_id_is_current(tp) and not is_unnamed

    def _gain(self, tp: TopicPartition, entry: Entry, sent: float, now: float) -> None:
        if not self._is_offset_of_present_topic(tp):  # Until then, we cannot say which records are which.
            self._say_released(tp, self.view.start_of(tp), now)
            return
        until = sent + STALE_INTERVALS * self._timing.interval
        held = self._held[tp] = HeldPartition(Claim(self.view.start_of(tp)), until, now)
        self._topic_id_when_gained[tp] = (self.view.forms[tp.topic].topic_id,)
        self._trend.forget()
        self._actions.append(ClaimGained(tp, held.claim.position, entry.offset))
        self._beat(tp, held, now)

    def _announce_recreation(self, tp: TopicPartition, topic_id: str, before: Iterable[str], now: float) -> None:
        """Write that another topic has taken the place of those before, which the log knows or we were told of."""
        since, pause = self._announced.get(tp.topic, (NEVER, self._timing.interval))
        if since < now:
            self._announced[tp.topic] = (now, min(2 * pause, self._timing.lookback))
        common = (VERSION, self._timestamp(now), ",".join((topic_id, *before)), TOPIC_CLIENT, self._group, *tp)
        self._actions.append(Send(ReleasingPartition(*common, 0), self.view.coordination_partition(tp.topic)))

    def resume(self, now: float) -> None:
        """Take over what a former instance of our client holds."""
        room = len(self.view.partitions()) if self._limit is None else self._limit
        for tp in self.view.partitions():
            owner = self.view.owner(tp, now) if self.view.topic_id_is_current(tp) else None
            if room > 0 and owner is not None and owner.client_id == self.me.client_id:
                room -= 1
                self._planner.wait_for(tp, now)
                self._say(tp, Heartbeat(*self._common(tp, now), self.view.start_of(tp)), now)

    def tick(self, now: float) -> None:
        """Write heartbeats, claims, requests and releases that are due."""
        self._notice_stall(now)
        for tp, held in list(self._held.items()):
            if held.repaired > NEVER and self._may_claim(tp):
                self._repair(tp, held, now)
            elif now - held.beaten >= self._timing.beat:
                self._beat(tp, held, now)
        if self._planner.is_due(now):
            self._round(now)

    def _notice_stall(self, now: float) -> None:
        """Note that we run, and whether we did not for longer than a lease lasts."""
        if now - self._ran > STALE_INTERVALS * self._timing.interval:
            self._stamp += 1  # No message from before the stall has it.
            self._stalled = dict.fromkeys(self._read_up_to, self._stamp)
            self._outdated_topic_id.clear()  # Meanwhile, we were told nothing.
        self._ran = now

    def _may_claim(self, tp: TopicPartition) -> bool:
        """Whether we may claim a partition again that we believe to hold.

        Not after a stall. Others may have held and released it since, and its topic may have been recreated: then our
        position would be wrong. Until we have read the log as far as a message that we sent after the stall, we send
        heartbeats alone, at offset 0. They do not count where the partition is not ours. If the coordination topic was
        recreated, too, they do count, and move no position.
        """
        return self.view.coordination_partition(tp.topic) not in self._stalled

    def _beat(self, tp: TopicPartition, held: HeldPartition, now: float) -> None:
        held.beaten = now
        if now - held.renewed > self._timing.renewal and self._may_claim(tp):
            held.renewed = now
            self._say(tp, ClaimingPartition(*self._common(tp, now)), now)
        # Once the lease has ended, our position may be of a former topic.
        offset = self._offset(held.claim) if held.until > now and self._may_claim(tp) else 0
        self._say(tp, Heartbeat(*self._common(tp, now), offset), now)

    def _round(self, now: float) -> None:
        """Claim, ask and release by the plan; release all while the group is paused or nobody polls."""
        if self.view.is_paused(now):
            self._release(list(self._held), "the group is paused", now)
            return
        if now - self._polled > self._timing.idle:
            self._release(list(self._held), f"nobody polled for {self._timing.idle:.0f} s", now)
            return
        self._leaving = {tp: last for tp, last in self._leaving.items() if now - last.sent < self._planner.patience}
        holders = {tp: self.me if tp in self._held else self.view.owner(tp, now) for tp in self.view.partitions()}
        if not holders or self._left:
            return
        for tp, holder in holders.items():
            if holder == self.me and tp not in self._held and tp not in self._leaving:
                self._say_released(tp, self.view.start_of(tp), now)  # The log did not get it the first time.
        unclear = {tp for tp in holders if not self._is_offset_of_present_topic(tp)}
        todo = self._planner.next_plan(holders, self.view.members(now), self.view.left_by, now, unclear=unclear)
        self._release([tp for tp in todo.release if tp in self._held], "others have room for it", now)
        for tp in todo.claim:
            if tp not in self._leaving:
                self._planner.wait_for(tp, now)
                self._say(tp, ClaimingPartition(*self._common(tp, now)), now)
        if todo.ask is not None:
            self._say(todo.ask, ClaimingPartition(*self._common(todo.ask, now)), now)

    def leave(self, now: float, *, keep: bool) -> None:
        """Write our positions and release all partitions; with `keep`, leave them to our client's next instance."""
        self._notice_stall(now)
        self._left = True
        for tp in [tp for tp in self._held if not self._may_claim(tp)]:
            self._lose(tp, "this run ends")
        for tp, held in list(self._held.items()) if keep else ():
            offset = held.claim.position if self._at_most_once else held.claim.offset
            self._say(tp, Heartbeat(*self._common(tp, now), offset), now)
            self._lose(tp, "this run ends")
        self._release(list(self._held), "this run ends", now)

    @property
    def has_left(self) -> bool:
        """Whether the log has all messages that `leave` wrote."""
        return not self._unanswered

    def _release(self, partitions: Collection[TopicPartition], why: str, now: float) -> None:
        """Give up partitions: hand out no more of their records, and tell the log where to go on.

        Those that we may not claim are left for a later round: our position may be of a former topic.
        """
        for tp in [tp for tp in partitions if self._may_claim(tp)]:
            claim = self._held[tp].claim
            self._say_released(tp, claim.position if self._at_most_once else claim.offset, now)
            self._lose(tp, why)

    def _note_release(self, tp: TopicPartition, now: float) -> None:
        """Give the release that is sent next a timestamp of its own: no earlier message must be taken for it."""
        if self._unanswered.has(tp, self._timestamp(now)):
            self._stamp += 1
        self._leaving[tp] = _Release(now, self._stamp)

    def _say_released(self, tp: TopicPartition, offset: int, now: float) -> None:
        self._note_release(tp, now)
        self._say(tp, ReleasingPartition(*self._common(tp, now), offset), now)

    def _lose(self, tp: TopicPartition, why: str) -> None:
        del self._held[tp]
        self._trend.forget()
        self._actions.append(ClaimLost(tp, self._read_up_to[self.view.coordination_partition(tp.topic)], why))

    def _offset(self, claim: Claim) -> int:
        return claim.promised if self._at_most_once else claim.offset

    def _say(self, tp: TopicPartition, message: Message, now: float) -> None:
        self._unanswered.add(tp, message.timestamp, now)
        self._actions.append(Send(message, self.view.coordination_partition(tp.topic)))

    def _timestamp(self, now: float) -> int:
        self._stamp = max(self._stamp, int(self.view.log_time(now)))
        return self._stamp

    def _common(self, tp: TopicPartition, now: float) -> tuple[int, int, str, str, str, str, int]:
        return (VERSION, self._timestamp(now), *self.me, self._group, *tp)
