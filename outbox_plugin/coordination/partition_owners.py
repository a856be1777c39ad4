"""Who owns which partition, computed from the log alone. Marshal calls the result the world, and this the rationalizer.

Every instance applies the same messages in the same order, and so reaches the same world. The rules, for a message that
the broker appended at `t`:

    message             counts when                                                 then
    ClaimingPartition   the partition is free: unclaimed, released, or stale at t;  the sender holds it
                        and the group is not paused, or the sender paused it
    Heartbeat           the sender holds it, and it is not stale at t               it is fresh; offset moves forward
    both of these       the sender is a new instance of the client that holds it,   the sender holds it: it resumes
                        and it is not stale at t
    ClaimingMessages    the sender holds it, and it is not stale at t               offset moves forward
    ReleasingPartition  the sender holds it, and it is not stale at t; or a pause   it is free, at exactly that offset
                        took it, and nobody has claimed it since
    ReleasingPartition  its client is TOPIC_CLIENT, and its instance id names a      it is free, at exactly that offset
                        topic that has taken the place of the last one
    ReleaseGroup        always                                                      all is released, and stays so

All else changes nothing. Fresh: a heartbeat less than an interval ago. Stale: none for more than two.

The only clock is the log's: the time at which the broker appended a message (LogAppendTime), which is the `now` that
`apply` is given. All instances agree on it, and no sender's clock decides who holds what. Of a ReleaseGroup, the
sender's timestamp says how long it lasts: from `timestamp` to `expires`, beginning when it was appended.

A topic that was deleted and recreated has other records at the same offsets. An instance that notices it writes a
ReleasingPartition of TOPIC_CLIENT. Its instance id has the new topic's id, and behind it the ids of those before it, as
far as its sender knows them. It counts only if its sender knows the last id that the log has named: a broker that is
behind names a former topic again, and nobody can tell that from its answer. The partition can be claimed two intervals
later: whoever held it, even one that is stale or has just released it, may write of the old topic until it has read
this. A message that names the last id again frees the partition, too, and leaves the offset as it is: whoever began to
read later may not know that it was named before, and all must agree on who holds the partition.

An id that was there before counts again only from a sender that names it as a former one, too. It does so after all
brokers have told it nothing else for long, so that a wrong id does not bind a group for ever.

An instance that reads only the last part of the log does not know who held what when that part began, so it cannot tell
whether a claim counted. But a holder sends heartbeats from its claim on; all others send one at most, when they come
back late. So the sender of a heartbeat is taken for the holder, and for certain after its second one; but not if the
topic was recreated in the part that we have read, and the sender has not claimed the partition since. A claim counts
after a silence in which every holder would have become stale, and after a pause, which released all. From then on the
rules above hold. Where claims alone come for long, as when the coordination topic is new and all ask at once, one
counts at last. Whoever began to read earlier may have counted an earlier one: the heartbeats of its sender decide.

A message that was sent before that part began, by the time in it, may tell a position of a former topic. It never moves
the offset forward. The time in it is the log's, as far as its sender had read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outbox_plugin.coordination.messages import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Message,
    ReleaseGroup,
    ReleasingPartition,
)

State = Literal["fresh", "unknown", "stale", "unclaimed", "paused"]

STALE_INTERVALS = 2
TOPIC_CLIENT = "outbox-topic"
NO_END = 253_402_300_799  # The end of the year 9999: Marshal cannot read a pause without an end.
REMEMBERED_INSTANCES = 4  # Former instances of a client, per partition, whose late heartbeats must not take it back.
REMEMBERED_TOPICS = 8  # Ids of a partition's topic and of those before it.
CROWD = 64
LONGEST_DOUBT = 6  # A claim counts, though others came before it, after so many times the time until a holder is stale.
FOREVER = float("inf")


class Holder(NamedTuple):
    """Who holds a partition: one run of a client."""

    instance_id: str
    client_id: str


class Key(NamedTuple):
    """What is claimed."""

    group_id: str
    topic: str
    partition: int


def topic_ids_of(text: str) -> tuple[str, ...]:
    """The ids of a topic and of those before it, from the form in which messages and kept positions have them."""
    return tuple(each for each in text.split(",") if each)


def _joined(later: tuple[str, ...], earlier: tuple[str, ...]) -> tuple[str, ...]:
    """The ids of a topic and of those before it, from what two tell."""
    return tuple(dict.fromkeys((*later, *earlier)))[:REMEMBERED_TOPICS]


@dataclass(slots=True)
class _ClaimState:
    """The state of one partition of one group."""

    holder: Holder | None = None
    heartbeat: float = 0.0
    pauses: int = 0  # Of its group, when it was claimed: a later pause took it away.
    offset: int | None = None
    topic_ids: tuple[str, ...] = ()  # Of the topic that `offset` belongs to, and of those before it, if they are known.
    is_topic_of_log: bool = False  # Whether the log has named the topic; else a remembered position has.
    left_by: Holder | None = None  # Who gave it up by its own word, where nobody has claimed it since.
    former: tuple[str, ...] = ()
    barred: float = -FOREVER  # Until then nobody may claim it: its holder may not know that its topic was recreated.
    kept: tuple[float, int, tuple[str, ...]] | None = None  # What is remembered: the log's time, offset, topic ids.
    doubt: float = -FOREVER  # Until then, and until a holder shows itself, we cannot say what a claim was worth.
    claimants: set[Holder] | None = None  # In doubt: who has claimed it since its topic was recreated, if it was.

    @property
    def topic_id(self) -> str:
        """The id of the topic that `offset` belongs to; empty if it is not known."""
        return next(iter(self.topic_ids), "")

    @property
    def known_former_ids(self) -> tuple[str, ...]:
        """The ids of earlier topics, also those that only a remembered position knows whose time is yet to come.

        Without them, one who began to read later would let a late message count that names an earlier topic.
        """
        _, _, remembered = self.kept or (0.0, 0, ())
        return (*self.topic_ids[1:], *remembered[1:])

    def pass_to(self, holder: Holder, at: float, pauses: int) -> None:
        """Let an instance hold the partition that did not hold it before, nor did its client.

        Args:
            holder: the instance.
            at: when it claimed the partition, or showed that it holds it.
            pauses: how many its group has had.
        """
        self.holder, self.heartbeat, self.pauses, self.former = holder, at, pauses, ()

    def move_to(self, offset: int | None) -> None:
        """Let the group go on at an offset, if it is a later one."""
        if offset is not None:
            self.offset = offset if self.offset is None else max(self.offset, offset)

    def may_have_claimed(self, holder: Holder) -> bool:
        """Return whether an instance may hold the partition. Since its topic was recreated, we have read all claims."""
        return self.claimants is None or holder in self.claimants

    def recall(self) -> None:
        """Take over what is remembered, unless it is of another topic.

        Of the log's offset and the remembered one, the greater counts: where the coordination topic was recreated, the
        log may not have a promise that was kept.
        """
        if self.kept is not None:
            _, offset, topic_ids = self.kept
            self.kept = None
            if not topic_ids or self.topic_id in ("", topic_ids[0]):
                self.move_to(offset)
            self.topic_ids = _joined(self.topic_ids, topic_ids)


@dataclass(slots=True)
class _MemberState:
    """An instance that was heard of lately, with or without claims."""

    heard: float
    asked: float = -FOREVER  # When it last asked for a partition that was not free.


class _Group:
    """The state of one group."""

    __slots__ = ("crowd", "latest", "members", "paused_at", "paused_by", "paused_until", "pauses")

    def __init__(self) -> None:
        self.latest = -FOREVER
        self.crowd = CROWD  # With this many members, forget those that are gone.
        self.pauses = 0
        self.paused_at = -FOREVER
        self.paused_until = -FOREVER
        self.paused_by = ""
        self.members: dict[Holder, _MemberState] = {}


class Row(NamedTuple):
    """One partition, as a table shows it; `heard_seconds` is the age of its last heartbeat."""

    key: Key
    state: State
    holder: Holder | None
    offset: int | None
    heard_seconds: float | None


class Pause(NamedTuple):
    """Until when a group is paused (seconds since the epoch), and the client that paused it."""

    until: float
    by: str


class World:
    """Who holds which partition. Times are seconds since the epoch; `now` is the log's time, if it is known."""

    def __init__(self, heartbeat_interval_seconds: float, *, since: float = -FOREVER) -> None:
        """Begin with an empty log.

        Args:
            heartbeat_interval_seconds: the interval, which must be the same in all instances of a group.
            since: when the part of the log that is read begins (seconds since the epoch).
        """
        self._interval = heartbeat_interval_seconds
        self._stale_after = STALE_INTERVALS * heartbeat_interval_seconds
        self._since = since
        self._claims: dict[Key, _ClaimState] = {}
        self._groups: dict[str, _Group] = {}
        self._kept_pauses: dict[str, ReleaseGroup] = {}  # They count at the end, where the log has no later word.

    def apply(self, message: Message, now: float) -> bool:
        """Apply the log's next message, which was appended at `now`. Returns whether it counted."""
        group = self._groups.get(message.group_id)
        if group is None:
            group = self._groups[message.group_id] = _Group()
        if isinstance(message, ReleaseGroup):
            self._kept_pauses.pop(message.group_id, None)
            self._release_group(group, message, now)
            if not group.pauses and self._since > -FOREVER:
                self._doubt_all(message.group_id, now)
            return True
        holder = Holder(message.instance_id, message.client_id)
        key = Key(message.group_id, message.topic, message.partition)
        claim = self._claims.get(key)
        if claim is not None and claim.kept is not None and now > claim.kept[0]:
            claim.recall()
        if holder.client_id == TOPIC_CLIENT:
            return self._apply_recreation(key, topic_ids_of(holder.instance_id), message, now)
        member = self._heard(group, holder, now)
        if claim is None and (isinstance(message, ClaimingPartition) or self._since > -FOREVER):
            claim = self._claims[key] = _ClaimState(doubt=self._since + self._stale_after)
        if claim is not None and claim.doubt > -FOREVER:
            self._settle(group, claim, holder, message, now)
        if claim is None:
            return False
        if isinstance(message, ClaimingPartition):
            return self._claim(group, claim, holder, member, now)
        if claim.holder is None or now - claim.heartbeat > self._stale_after:
            return False
        if isinstance(message, Heartbeat):
            return self._beat(group, claim, holder, self._told_by(claim, message), now)
        if isinstance(message, ClaimingMessages):
            return self._advance(group, claim, holder, message.offset)
        return self._release(claim, holder, message)

    def remember(self, key: Key, offset: int, topic_ids: tuple[str, ...], at: float) -> None:
        """Remember a group's position in a partition.

        If `at` is in the part of the log that is read, the position counts only once that point has been reached: the
        messages before it may be about an earlier topic.

        Args:
            key: the group and the partition.
            offset: where the group goes on.
            topic_ids: of the topic that the offset belongs to, and of those before it; empty if they are not known.
            at: the log's time of this position.
        """
        claim = self._claims.get(key)
        if claim is None:
            doubt = self._since + self._stale_after if self._since > -FOREVER else -FOREVER
            claim = self._claims[key] = _ClaimState(doubt=doubt)
            self._groups.setdefault(key.group_id, _Group())
        claim.kept = (at, offset, topic_ids)
        if at < self._since:
            claim.recall()

    def remember_pause(self, message: ReleaseGroup) -> None:
        """Remember a group's last pause, or its end.

        If the part of the log that is read has it, it counts from its place on: what was claimed before it counts, and
        so does a holder's release behind it.

        Args:
            message: as it was in the log.
        """
        if message.timestamp < self._since:
            self.apply(message, float(message.timestamp))
        else:
            self._kept_pauses[message.group_id] = message

    def recall_all(self) -> None:
        """Let remembered positions and pauses count, because all of the log has been read."""
        for claim in self._claims.values():
            claim.recall()
        for message in [*self._kept_pauses.values()]:
            self.apply(message, float(message.timestamp))

    def left_by(self, group_id: str, topic: str, partition: int) -> Holder | None:
        """Return the instance that released a free partition itself.

        Args:
            group_id: the group.
            topic: the topic.
            partition: one of its partitions.
        """
        claim = self._claims.get(Key(group_id, topic, partition))
        return None if claim is None or claim.holder is not None else claim.left_by

    def topic_ids(self, group_id: str, topic: str, partition: int) -> tuple[str, ...]:
        """Return the ids of the topic that the partition's offset belongs to and of those before it, the latest first.

        Args:
            group_id: the group.
            topic: the topic.
            partition: one of its partitions.
        """
        claim = self._claims.get(Key(group_id, topic, partition))
        return () if claim is None else claim.topic_ids

    def latest_holder(self, group_id: str, topic: str, partition: int) -> Holder | None:
        """Return who holds the partition or became stale in it last; None after a release or a pause.

        Args:
            group_id: the group.
            topic: the topic.
            partition: one of its partitions.
        """
        claim = self._claims.get(Key(group_id, topic, partition))
        if claim is None or claim.pauses != self._groups[group_id].pauses:
            return None
        return claim.holder

    def owner(self, group_id: str, topic: str, partition: int, now: float) -> Holder | None:
        """Return the instance and the client that hold the partition at `now`; None if it can be claimed.

        Args:
            group_id: the group.
            topic: the topic.
            partition: one of its partitions.
            now: the time, by the log.
        """
        claim = self._claims.get(Key(group_id, topic, partition))
        if claim is None or not self._holds(self._groups[group_id], claim, now):
            return None
        return claim.holder

    def offset(self, group_id: str, topic: str, partition: int) -> int | None:
        """Return the offset at which the group goes on in the partition; None if the log has none.

        Args:
            group_id: the group.
            topic: the topic.
            partition: one of its partitions.
        """
        claim = self._claims.get(Key(group_id, topic, partition))
        return None if claim is None else claim.offset

    def state(self, group_id: str, topic: str, partition: int, now: float) -> State:
        """Return the state of the partition at `now`, for an instance that would claim it.

        Args:
            group_id: the group.
            topic: the topic.
            partition: one of its partitions.
            now: the time, by the log.
        """
        group, claim = self._groups.get(group_id), self._claims.get(Key(group_id, topic, partition))
        if group is None:
            return "unclaimed"
        if claim is None or claim.holder is None or claim.pauses != group.pauses:
            return "paused" if now < group.paused_until else "unclaimed"
        age = now - claim.heartbeat
        return "fresh" if age < self._interval else "unknown" if age <= self._stale_after else "stale"

    def paused(self, group_id: str, now: float) -> bool:
        """Return whether the group is paused at `now`."""
        group = self._groups.get(group_id)
        return group is not None and now < group.paused_until

    def pauses(self, now: float) -> dict[str, Pause]:
        """Return the pauses of all paused groups, by group."""
        return {
            group_id: Pause(group.paused_until, group.paused_by)
            for group_id, group in self._groups.items()
            if now < group.paused_until
        }

    def members(self, group_id: str, now: float) -> dict[Holder, bool]:
        """The group's live instances, and whether each has lately asked for more than it has.

        Of each client, only its newest instance counts: it has replaced the others.
        """
        group = self._groups.get(group_id)
        if group is None:
            return {}
        since = now - self._stale_after
        live = {each: member.asked >= since for each, member in group.members.items() if member.heard >= since}
        latest = {each.client_id: each for each in live}
        return {each: asks for each, asks in live.items() if latest[each.client_id] == each}

    def rows(self, now: float) -> Iterator[Row]:
        """Yield all partitions that the log names, sorted."""
        for key, claim in sorted(self._claims.items()):
            state = self.state(*key, now)
            holder = claim.holder if state in ("fresh", "unknown", "stale") else None
            yield Row(key, state, holder, claim.offset, now - claim.heartbeat if holder else None)

    def _holds(self, group: _Group, claim: _ClaimState, at: float) -> bool:
        return claim.holder is not None and claim.pauses == group.pauses and at - claim.heartbeat <= self._stale_after

    def _heard(self, group: _Group, holder: Holder, at: float) -> _MemberState:
        group.latest = max(group.latest, at)
        member = group.members.get(holder)
        if member is not None:
            member.heard = max(member.heard, at)
            return member
        if len(group.members) >= group.crowd:
            since = group.latest - self._stale_after
            group.members = {each: known for each, known in group.members.items() if known.heard >= since}
            group.crowd = max(CROWD, 2 * len(group.members))
        member = group.members[holder] = _MemberState(at)
        return member

    def _settle(self, group: _Group, claim: _ClaimState, holder: Holder, message: Message, at: float) -> None:
        """Infer from a message who holds a partition whose claim we have not read."""
        age = at - claim.heartbeat
        lives = claim.holder if age <= self._stale_after else None
        theirs = lives is not None and lives.client_id == holder.client_id
        claims = isinstance(message, ClaimingPartition) and not theirs
        if claim.claimants is not None and isinstance(message, ClaimingPartition) and at > claim.barred:
            claim.claimants.add(holder)
        if group.paused_at >= self._since or at > claim.doubt:
            claim.doubt = -FOREVER
        elif claims:
            claim.doubt = max(claim.doubt, at + self._stale_after)
            # Whoever began to read earlier may have counted an earlier claim. Then its sender's heartbeats show that.
            longest = self._since + LONGEST_DOUBT * self._stale_after
            if lives is None and at > max(longest, claim.barred) and not self._is_paused_for(group, holder, at):
                claim.pass_to(holder, at, group.pauses)
        elif isinstance(message, Heartbeat) and lives == holder and age > 0:
            claim.doubt = -FOREVER
        elif isinstance(message, Heartbeat) and not theirs and age >= 0 and claim.may_have_claimed(holder):
            claim.pass_to(holder, at, group.pauses)
            claim.move_to(self._told_by(claim, message))
            claim.doubt = max(claim.doubt, at + self._stale_after)
        if claim.doubt == -FOREVER:
            claim.claimants = None

    @staticmethod
    def _is_paused_for(group: _Group, holder: Holder, at: float) -> bool:
        return at < group.paused_until and holder.client_id != group.paused_by

    def _claim(self, group: _Group, claim: _ClaimState, holder: Holder, member: _MemberState, at: float) -> bool:
        held = self._holds(group, claim, at)
        if held and (claim.holder == holder or self._resume(claim, holder)):
            if claim.doubt == -FOREVER:  # Otherwise the claim may be a question.
                claim.heartbeat = max(claim.heartbeat, at)
            return True
        if held or claim.doubt > -FOREVER or at <= claim.barred:
            member.asked = max(member.asked, at)
            return False
        if self._is_paused_for(group, holder, at):
            return False
        claim.pass_to(holder, at, group.pauses)
        return True

    def _beat(self, group: _Group, claim: _ClaimState, holder: Holder, offset: int | None, at: float) -> bool:
        if claim.pauses != group.pauses or (claim.holder != holder and not self._resume(claim, holder)):
            return False
        claim.heartbeat = max(claim.heartbeat, at)
        claim.move_to(offset)
        return True

    def _told_by(self, claim: _ClaimState, message: Heartbeat | ReleasingPartition) -> int | None:
        """The offset of a message; None if it may be of a former topic.

        So it may if the message was sent before the topic was recreated, or before the part of the log that we read
        began. Its sender's clock is the log's time as far as it had read, which is never ahead. Nothing but an offset
        depends on it.
        """
        recreated = claim.barred - self._stale_after
        return message.offset if message.timestamp >= max(self._since, recreated) else None

    @staticmethod
    def _resume(claim: _ClaimState, holder: Holder) -> bool:
        """Pass the claim to a new instance of its client. Messages of the former instances no longer count."""
        former = claim.holder
        if former is None or former.client_id != holder.client_id or holder.instance_id in claim.former:
            return False
        claim.former = (*claim.former, former.instance_id)[-REMEMBERED_INSTANCES:]
        claim.holder = holder
        return True

    @staticmethod
    def _advance(group: _Group, claim: _ClaimState, holder: Holder, offset: int) -> bool:
        if claim.holder != holder or claim.pauses != group.pauses:
            return False
        claim.move_to(offset)
        return True

    def _apply_recreation(self, key: Key, topic_ids: tuple[str, ...], message: Message, at: float) -> bool:
        """Free a partition of a topic that was recreated. Whether this counts is decided by the log alone.

        A remembered position may know the new topic before the log does. It is as good as before then, but whoever
        holds the partition gives it up in all worlds.
        """
        claim = self._claims.setdefault(key, _ClaimState())
        if not isinstance(message, ReleasingPartition) or not topic_ids:
            return False
        topic_id, *before = topic_ids
        if topic_id in claim.known_former_ids and topic_id not in before:
            return False
        if claim.is_topic_of_log and claim.topic_id not in topic_ids:
            return False
        claim.barred = at + self._stale_after
        if claim.topic_id != topic_id:
            claim.offset = message.offset
        claim.holder, claim.former, claim.is_topic_of_log = None, (), True
        claim.topic_ids = _joined(topic_ids, claim.topic_ids)
        claim.claimants = set() if claim.doubt > -FOREVER else None
        return True

    def _release(self, claim: _ClaimState, holder: Holder, message: ReleasingPartition) -> bool:
        if claim.holder != holder:
            return False
        claim.holder, claim.former, claim.left_by = None, (), holder
        if self._told_by(claim, message) is not None:
            claim.offset = message.offset
        elif claim.offset is not None:  # It may set the group back, because the partition was cut.
            claim.offset = min(claim.offset, message.offset)
        return True

    def _doubt_all(self, group_id: str, at: float) -> None:
        """A pause ended of which we have not read: what was claimed before may not have counted.

        Nobody has claimed what was recreated less than two intervals ago.
        """
        for key, claim in self._claims.items():
            if key.group_id == group_id and at > claim.barred:
                claim.doubt = max(claim.doubt, at + self._stale_after)

    @staticmethod
    def _release_group(group: _Group, message: ReleaseGroup, at: float) -> bool:
        endless = message.expires is None or message.expires >= NO_END
        group.paused_until = FOREVER if endless else at + (message.expires or 0) - message.timestamp
        group.paused_by = message.client_id
        if at < group.paused_until:
            group.pauses += 1
            group.paused_at = at
        return True
