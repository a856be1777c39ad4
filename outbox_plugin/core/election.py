"""Who leads a shard: Fast NELI (goharvest's seeds, "Contention and availability"), with early takeover.

All that changes the state of an election is in this file; it knows neither Kafka nor a clock. `now` is in monotonic
seconds of this process; what others' clocks say is never compared.

Ownership of the shard's leader-topic partition, which Kafka's group coordinator hands to one member at most, makes a
leader. A leader sends heartbeats to that partition and listens to them itself: one that hears none of its own for
`receive_deadline` cannot know whether it still owns anything, and steps down.

Where an old leader is fenced, takeover need not wait for the group's session timeout: a follower that has heard a
leader, and then none for `silence`, becomes a candidate without ownership. At worst two candidates compete, and the
fence decides between them. In exactly-once delivery, Kafka fences the loser's producer. In at-least-once delivery, the
database lets only the leader that it remembers mark rows. A leader that hears another leader checks that it has not
been fenced itself, and ends its term if it has. A follower that has listened for as long and has heard no leader at all
does the same: brokers make the first member of a group wait for 3 s before they give it a partition. One that finds
at its start that nobody leads need not listen.

So a leader may lead without ownership. One that loses ownership goes on as well, until the owner asks for the shard
(`core.leadership_transfer`).

A candidate takes over once it has heard its own heartbeat, because by then it has heard every heartbeat that was sent
before. So a candidate that is cut off from the leader topic fences nobody. A candidate that hears a leader first stands
back. Without these two rules, a candidate could end the term of a healthy leader.

A harvester that stepped down because it heard none of its own heartbeats stays a follower until it hears one. If it
became a candidate that others hear and that hears nobody, it would keep all others from leading. Where nothing is
fenced, it then waits for another session timeout: within that time, its client either learns that it still owns the
partition, or gives the partition up.

goharvest has no early takeover. Where harvesters of both kinds share an election, neither has ours.

    state      what is seen                                      action
    following  the last term heard nothing of itself             FOLLOW, until something of it is heard
    following  another's heartbeat within `silence`              FOLLOW
    following  ownership of the partition                        ACQUIRE
    following  the leader resigned or fell silent, may be early  ACQUIRE
    following  nobody was heard for `silence`, may be early      ACQUIRE
    following  otherwise                                         FOLLOW
    leading    no own heartbeat for `receive_deadline`           STEP_DOWN
    leading    ownership was had, and is lost, never early       STEP_DOWN
    leading    another leader's heartbeat, before taking over    STAND_BACK
    leading    another leader's heartbeat, may be early          PROVE
    leading    otherwise                                         KEEP
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat


class ElectionAction(Enum):
    """The actions that an election asks for."""

    FOLLOW = auto()
    ACQUIRE = auto()
    KEEP = auto()
    PROVE = auto()
    STAND_BACK = auto()
    STEP_DOWN = auto()


@dataclass(frozen=True, slots=True)
class ElectionTiming:
    """Times in seconds. `spread` differs among followers, so that they do not become candidates in the same instant."""

    heartbeat_interval: float = 0.3
    silence: float = 1.0
    receive_deadline: float = 5.0
    session_timeout: float = 6.0
    spread: float = 0.0


class Election:
    """One harvester's view of one shard's election."""

    def __init__(self, timing: ElectionTiming, *, early_takeover: bool) -> None:
        """`early_takeover`: an old leader is fenced, so one that has fallen silent need not be waited for."""
        self._timing = timing
        self._early_takeover = early_takeover
        self._owns = False
        self._term: str | None = None
        self._term_owned = False  # Ownership was had at some time in this term.
        self._own_heard_at = 0.0
        self._hears_itself = False
        self._took_over = False
        self._unheard = False  # Our last term ended because it heard none of its heartbeats, and none has come since.
        self._doubted_until = 0.0  # Until then, do not rely on an ownership that we had before.
        self._former: str | None = None  # Our last term's; its late heartbeats may still arrive, and are ignored.
        self._other: str | None = None
        self._other_heard_at: float | None = None
        self.leader_heard_at: float | None = None  # When another harvester was last heard to lead; never forgotten.
        self._vacant_since: float | None = None  # When the leader resigned; it may have been us.
        self._challenger: str | None = None
        self._answered: set[str] = set()  # Challengers that this term has proved itself against.
        self._not_before = 0.0
        self._listening_since: float | None = None  # When a heartbeat of the shard was first heard, whosever it was.

    def stand_back_until(self, moment: float) -> None:
        """Do not compete before `moment`: the leader has named a successor."""
        self._not_before = max(self._not_before, moment)

    @property
    def allows_early_takeover(self) -> bool:
        """Whether a follower without ownership takes over when the leader has resigned."""
        return self._early_takeover

    @property
    def owns(self) -> bool:
        """Whether the group coordinator has given us the partition."""
        return self._owns

    @property
    def leader_id(self) -> str | None:
        """The leader id of our own term; None while following."""
        return self._term

    def set_ownership(self, owns: bool) -> None:
        """Take in whether the group coordinator has given us the partition."""
        if owns != self._owns:
            self._doubted_until = 0.0
        self._owns = owns
        self._term_owned = self._term_owned or (owns and self._term is not None)

    def receive(self, heartbeat: LeaderHeartbeat, now: float) -> None:
        """Take in a heartbeat of this shard, from any term, our own included."""
        if self._listening_since is None:
            self._listening_since = now
        if heartbeat.leader_id == self._term:
            self._own_heard_at, self._hears_itself = now, True
        elif heartbeat.leader_id == self._former:
            if self._unheard and not self._early_takeover:
                self._doubted_until = now + self._timing.session_timeout
            self._unheard = False
        elif heartbeat.phase == "resigned":
            if self._other_heard_at is None or heartbeat.leader_id == self._other:  # Not an earlier leader.
                self._vacated(now)
        elif heartbeat.phase in ("candidate", "leader"):
            self._other, self._other_heard_at, self._vacant_since = heartbeat.leader_id, now, None
            if heartbeat.phase == "leader":
                self.leader_heard_at = now
                if heartbeat.leader_id not in self._answered:
                    self._challenger = heartbeat.leader_id

    def assume_another_leads(self, now: float) -> None:
        """Assume that somebody leads whom we have not heard yet, for example after this process was stopped."""
        self._other, self._other_heard_at, self._vacant_since = None, now, None

    def assume_nobody_leads(self, now: float) -> None:
        """Assume that nobody leads, unless somebody has been heard: so it was when we connected."""
        if self._other_heard_at is None and self._term is None:
            self._vacated(now)

    def begin_term(self, leader_id: str, now: float) -> None:
        """Begin a term of ours under `leader_id`, which has never been used before."""
        self._term, self._term_owned, self._own_heard_at = leader_id, self._owns, now
        self._hears_itself = self._took_over = False
        self._challenger, self._answered = None, set()

    @property
    def may_take_over(self) -> bool:
        """Whether a heartbeat of our own term has come back, after all earlier heartbeats, and nobody else leads."""
        return self._term is not None and self._hears_itself and self._challenger is None

    def mark_taken_over(self) -> None:
        """Note that our term takes over: from now on it answers a challenge by a proof."""
        self._took_over = True

    @property
    def awaits_own_heartbeat(self) -> bool:
        """Whether a heartbeat of ours must come back before we may lead, or before silence means anything."""
        return self._unheard or (self._early_takeover and self._listening_since is None)

    def mark_proved(self) -> None:
        """Note that our term was found not to be fenced, after the challenge was heard."""
        if self._challenger is not None:
            self._answered.add(self._challenger)
        self._challenger = None

    def end_term(self, now: float, *, by_another: bool = False, retry_after: float = 0.0) -> None:
        """End our term.

        Args:
            now: in monotonic seconds.
            by_another: another leader has fenced us, or leads already.
            retry_after: the seconds for which we do not compete again.
        """
        self._unheard = now - self._own_heard_at > self._timing.receive_deadline
        self._former, self._term = self._term, None
        self._not_before = now + retry_after
        if by_another:
            self.assume_another_leads(now)
        elif not self._hears_another(now):
            self._vacated(now)

    def _vacated(self, now: float) -> None:
        self._other_heard_at, self._vacant_since = None, now

    def tick(self, now: float) -> ElectionAction:
        """The action for now. Changes nothing."""
        return self._while_following(now) if self._term is None else self._while_leading(now)

    def hears_leader(self, now: float) -> bool:
        """Whether another harvester was heard lately that has taken over, and not only tries to."""
        heard_at = self.leader_heard_at
        return self._hears_another(now) and heard_at is not None and now - heard_at <= self._timing.silence

    def _hears_another(self, now: float) -> bool:
        """Whether another harvester's heartbeat was heard lately, and no resignation after it."""
        return self._other_heard_at is not None and now - self._other_heard_at <= self._timing.silence

    def _while_following(self, now: float) -> ElectionAction:
        if self._unheard or now < self._not_before or self._hears_another(now):
            return ElectionAction.FOLLOW
        owns = self._owns and now >= self._doubted_until
        if owns or (self._early_takeover and self._leader_is_lost(now)):
            return ElectionAction.ACQUIRE
        return ElectionAction.FOLLOW

    def _while_leading(self, now: float) -> ElectionAction:
        if now - self._own_heard_at > self._timing.receive_deadline:
            return ElectionAction.STEP_DOWN
        if self._term_owned and not self._owns and not self._early_takeover:
            return ElectionAction.STEP_DOWN
        if self._challenger is not None and not self._took_over:
            return ElectionAction.STAND_BACK
        if self._challenger is not None and self._early_takeover:
            return ElectionAction.PROVE
        return ElectionAction.KEEP

    def _leader_is_lost(self, now: float) -> bool:
        if self._vacant_since is not None:
            return now - self._vacant_since > self._timing.spread / 3  # A new leader is heard at once.
        silent_since = self._listening_since if self._other_heard_at is None else self._other_heard_at
        return silent_since is not None and now - silent_since > self._timing.silence + self._timing.spread
