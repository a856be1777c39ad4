"""Who leads a shard: Fast NELI (goharvest's seeds, "Contention and availability"), with early takeover.

All that changes the state of an election is in this file; it knows neither Kafka nor a clock. `now` is in monotonic
seconds of this process; what others' clocks say is never compared.

Ownership of the shard's leader-topic partition, which Kafka's group coordinator hands to one member at most, makes a
leader. A leader sends heartbeats to that partition and listens to them itself: one that hears none of its own for
`receive_deadline` cannot know whether it still owns anything, and steps down.

Where an old leader is fenced, takeover need not wait for the group's session timeout: a follower that has heard a
leader, and then none for `silence`, becomes a candidate without ownership. At worst two candidates fight, and the fence
decides: the log's in exactly-once delivery, the database's in at-least-once delivery, where only the leader that the
database remembers can mark rows. A leader that hears another one proves itself: if it has been fenced, that fails.

A candidate takes over once it hears itself: by then it has heard whatever was said before. One that is cut off from
the leader topic has no right to fence anybody, and one that hears a leader before itself stands back: each would end
the term of a healthy leader.

Who stepped down because it heard nothing of itself stays a follower until it does again. As a candidate that is heard
and hears nothing, it would keep all others from rising. Where nothing is fenced, it then waits for another session
timeout: within that time, its client either is told that the partition is still its own, or gives it up by itself.

goharvest knows none of this. Where harvesters of both kinds share an election, there is no early takeover.

    state      what is seen                                      action
    following  the last term heard nothing of itself             FOLLOW, until something of it is heard
    following  another's heartbeat within `silence`              FOLLOW
    following  ownership of the partition                        ACQUIRE
    following  the leader resigned or fell silent, may be early  ACQUIRE
    following  otherwise                                         FOLLOW
    leading    no own heartbeat for `receive_deadline`           STEP_DOWN
    leading    ownership was had, and is lost                    STEP_DOWN
    leading    another leader's heartbeat, before taking over    STAND_BACK
    leading    another leader's heartbeat, may be early          PROVE
    leading    otherwise                                         KEEP
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from outbox_plugin.core.heartbeat import Heartbeat

YIELD_SILENCES = 3  # For so long is a shard whose ownership was taken from us left to its new owner.


class Action(Enum):
    """What an election asks for."""

    FOLLOW = auto()
    ACQUIRE = auto()
    KEEP = auto()
    PROVE = auto()
    STAND_BACK = auto()
    STEP_DOWN = auto()


@dataclass(frozen=True, slots=True)
class ElectionTiming:
    """Seconds. `spread` keeps followers of one leader from rising in the same instant: each gets its own."""

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
        self._unheard = False  # Our last term ended because it heard nothing of itself, and nothing came since.
        self._doubted_until = 0.0  # Until then, ownership that we had before is not believed in.
        self._former: str | None = None  # Our last term's; its late heartbeats may still arrive, and are ignored.
        self._other: str | None = None
        self._other_heard_at: float | None = None
        self.leader_heard_at: float | None = None  # When another harvester was last heard to lead; never forgotten.
        self._vacant_since: float | None = None  # The leader has resigned; perhaps we were it.
        self._challenger: str | None = None
        self._answered: set[str] = set()  # Challengers that this term has proved itself against.
        self._not_before = 0.0
        self._yielding_until = 0.0

    @property
    def leader_id(self) -> str | None:
        """The leader id of our own term; None while following."""
        return self._term

    def owns(self, owns: bool) -> None:
        """The group coordinator gave us the partition, or took it."""
        if owns != self._owns:
            self._doubted_until = 0.0
        self._owns = owns
        self._term_owned = self._term_owned or (owns and self._term is not None)

    def heard(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat of this shard arrived from the log; of whatever term, our own included."""
        if heartbeat.leader_id == self._term:
            self._own_heard_at, self._hears_itself = now, True
        elif heartbeat.leader_id == self._former:
            if self._unheard and not self._early_takeover:
                self._doubted_until = now + self._timing.session_timeout
            self._unheard = False
        elif heartbeat.phase == "resigned":
            if self._other_heard_at is None or heartbeat.leader_id == self._other:  # Not one that was replaced before.
                self._vacated(now)
        elif heartbeat.phase in ("candidate", "leader"):
            self._other, self._other_heard_at, self._vacant_since = heartbeat.leader_id, now, None
            if heartbeat.phase == "leader":
                self.leader_heard_at = now
                if heartbeat.leader_id not in self._answered:
                    self._challenger = heartbeat.leader_id

    def woke(self, now: float) -> None:
        """We were stopped for long: what we own may be another's by now, so take it that somebody leads, and listen."""
        self._another_rose(now)

    def began(self, leader_id: str, now: float) -> None:
        """A term of ours begins under `leader_id`, which has never been used before."""
        self._term, self._term_owned, self._own_heard_at = leader_id, self._owns, now
        self._hears_itself = self._took_over = False
        self._challenger, self._answered = None, set()

    @property
    def may_take_over(self) -> bool:
        """Whether a heartbeat of our own term has come back, behind all that was said before, and nobody else leads."""
        return self._term is not None and self._hears_itself and self._challenger is None

    def took_over(self) -> None:
        """Our term takes over: from now on a challenge is answered by a proof."""
        self._took_over = True

    @property
    def unheard(self) -> bool:
        """Whether a heartbeat of ours must come back before we may lead again."""
        return self._unheard

    def proved(self) -> None:
        """Our term was found not to be fenced, after the challenge was heard."""
        if self._challenger is not None:
            self._answered.add(self._challenger)
        self._challenger = None

    def ended(self, now: float, *, by_another: bool = False, retry_after: float = 0.0) -> None:
        """Our term is over. `by_another`: we were fenced, so somebody leads. Not to be tried again for some seconds."""
        if self._term_owned and not self._owns:
            self._yielding_until = now + YIELD_SILENCES * self._timing.silence
        self._unheard = now - self._own_heard_at > self._timing.receive_deadline
        self._former, self._term = self._term, None
        self._not_before = now + retry_after
        if by_another:
            self._another_rose(now)
        elif not self.another_leads(now):
            self._vacated(now)

    def _another_rose(self, now: float) -> None:
        """Somebody leads whom we have not heard yet."""
        self._other, self._other_heard_at, self._vacant_since = None, now, None

    def _vacated(self, now: float) -> None:
        self._other_heard_at, self._vacant_since = None, now

    def tick(self, now: float) -> Action:
        """What is to be done now; asking changes nothing."""
        return self._while_following(now) if self._term is None else self._while_leading(now)

    def another_leads(self, now: float) -> bool:
        """Whether another harvester's heartbeat was heard lately, and no resignation after it."""
        return self._other_heard_at is not None and now - self._other_heard_at <= self._timing.silence

    def _while_following(self, now: float) -> Action:
        if self._unheard or now < self._not_before or self.another_leads(now):
            return Action.FOLLOW
        owns = self._owns and now >= self._doubted_until
        may_rise = self._early_takeover and now >= self._yielding_until
        if owns or (may_rise and self._leader_is_lost(now)):
            return Action.ACQUIRE
        return Action.FOLLOW

    def _while_leading(self, now: float) -> Action:
        if now - self._own_heard_at > self._timing.receive_deadline:
            return Action.STEP_DOWN
        if self._term_owned and not self._owns:
            return Action.STEP_DOWN
        if self._challenger is not None and not self._took_over:
            return Action.STAND_BACK
        if self._challenger is not None and self._early_takeover:
            return Action.PROVE
        return Action.KEEP

    def _leader_is_lost(self, now: float) -> bool:
        if self._vacant_since is not None:
            return now - self._vacant_since > self._timing.spread / 3  # Whoever rises is heard at once.
        return self._other_heard_at is not None and now - self._other_heard_at > (
            self._timing.silence + self._timing.spread
        )
