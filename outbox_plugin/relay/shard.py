"""One shard in one harvester: does what the election decides, and lets the report speak of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.election import Election, ElectionAction
from outbox_plugin.core.intervals import ERROR_FIRST, ERROR_LAST
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.core.leadership_transfer import STAND_BACK_SECONDS, SUCCESSOR_SECONDS, LeadershipTransfer
from outbox_plugin.core.shard_leaders import ShardLeaders
from outbox_plugin.errors import Fenced, LayoutChanged, OutcomeUnknown, TopicMissing
from outbox_plugin.relay.events import HarvestEvent, Observer, TakeoverBegan, TermFinished
from outbox_plugin.relay.leader_term import Ending, LeaderTerm, OpenRelay
from outbox_plugin.relay.runtime import Runtime
from outbox_plugin.relay.server_probe import ServerProbe
from outbox_plugin.relay.shard_report import ShardReport

# A term that gives way to the owner counts as the leader for so long. Nobody else takes over while it finishes.
FINISH_SECONDS = 5.0
# A term that survives this long resets the backoff, and ends the trouble of the one before it if it has taken over.
CALM_SECONDS = 5.0
# A term that waits this long for one answer reports that. It may take much longer until it gives up and says more.
LONG_WAIT_SECONDS = 5.0
LONG_WAIT = f"Kafka has not answered for more than {LONG_WAIT_SECONDS:.0f} s"
LONG_POSTGRES_WAIT = (
    f"Postgres has not answered for more than {LONG_WAIT_SECONDS:.0f} s: another session may have locked a table of "
    "the outbox, or rows (see pg_locks)"
)
LONG_TAKEOVER = f"Kafka, or Postgres, has not answered a takeover for more than {LONG_WAIT_SECONDS:.0f} s"


@dataclass(frozen=True, slots=True)
class ShardServices:
    """What all shards of a harvester use.

    Args:
        open_relay: connects for a term and makes its relay.
        send: sends a heartbeat without waiting.
        observe: is told what happens.
        runtime: time and threads.
        wall_clock: the time as ISO 8601 in UTC, for people to read.
        jitter: a random number from 0 to 1, for waits.
        broker_probe: whether all brokers answer this harvester.
        postgres_probe: whether Postgres does.
        leaders: who leads which shard.
    """

    open_relay: OpenRelay
    send: Callable[[LeaderHeartbeat], None]
    observe: Observer
    runtime: Runtime
    wall_clock: Callable[[], str]
    jitter: Callable[[], float]
    broker_probe: ServerProbe
    postgres_probe: ServerProbe
    leaders: ShardLeaders = field(default_factory=ShardLeaders)


class Shard:
    """Carries out what the shard's election decides. Only the supervisor's thread calls its methods."""

    def __init__(self, number: int, election: Election, report: ShardReport, services: ShardServices) -> None:
        """Follow, until the election decides otherwise.

        Args:
            number: which shard.
            election: decides.
            report: makes the heartbeats.
            services: shared with the harvester's other shards.
        """
        self.number = number
        self.election = election
        self.begin_again: LayoutChanged | TopicMissing | None = None  # Why all shards must begin again, if they must.
        self._report = report
        self._services = services
        self._term: LeaderTerm | None = None
        self._finishes_until = 0.0  # A term that gives way to the owner.
        self._transfer = LeadershipTransfer()
        self._backoff = Backoff(ERROR_FIRST, ERROR_LAST)

    def receive(self, heartbeat: LeaderHeartbeat, now: float) -> None:
        """Take in a heartbeat of this shard, from any harvester."""
        self.election.receive(heartbeat, now)
        self._services.leaders.receive(heartbeat, now)
        if heartbeat.successor not in ("", self._report.instance):
            self.election.stand_back_until(now + SUCCESSOR_SECONDS)
        self._transfer.receive(heartbeat, self.election.leader_id, now)

    def step(self, now: float) -> None:
        """Do what is due now, without waiting."""
        if self._term is not None:
            self._look_after(self._term, now)
        self._act(self.election.tick(now), now)
        can_replace = self._settle_transfer(now)
        self._report.long_wait = self._long_wait(now)
        self._send_heartbeat(now, can_replace)
        if (event := self._report.step_event(now, self._phase(now), self.election.leader_heard_at)) is not None:
            self._services.observe(event)

    def _look_after(self, term: LeaderTerm, now: float) -> None:
        if term.is_over:
            self._finish(term, now)
        elif term.take_proof():
            self.election.mark_proved()
        elif self.election.may_take_over:
            self.election.mark_taken_over()
            term.take_over()

    @property
    def leads(self) -> bool:
        """Whether our term has taken over, and has not ended."""
        return self._term is not None and self._term.phase == "leader"

    @property
    def _active_term(self) -> LeaderTerm | None:
        """Our term, unless it has been asked to end."""
        return self._term if self._term is not None and not self._term.stopping else None

    def _act(self, action: ElectionAction, now: float) -> None:
        term = self._active_term
        match action:
            case ElectionAction.ACQUIRE:
                self._begin_term(now)
            case ElectionAction.PROVE if self._term is not None:
                self._term.prove()
            case ElectionAction.STEP_DOWN if term is not None:
                self._report.trouble = Ending.STEPPED_DOWN.value
                term.abandon(Ending.STEPPED_DOWN)
            case ElectionAction.STAND_BACK if term is not None:
                term.abandon(Ending.STOOD_BACK)
            case _:
                pass

    def _settle_transfer(self, now: float) -> str | None:
        """Give way if our term is stalled and a follower's would not be, or to the owner of the shard's partition.

        Returns the leader id of another harvester's term that we can replace; None if there is none.
        """
        if not self.election.allows_early_takeover:
            return None
        self._inform_transfer(now)
        if self._give_to_owner(now) or (since := self._transfer.ask_since(now)) is None:
            return None
        all_answer = self._services.broker_probe.result(since)
        self._resign_if_another_reaches_more(all_answer, now)
        return None if self._term is not None else self._replaceable_leader(all_answer, since, now)

    def _inform_transfer(self, now: float) -> None:
        owns, leaders = self.election.owns, self._services.leaders
        is_uneven = owns and leaders.would_be_more_even(self.number, self._report.instance, now)
        self._transfer.set_ownership(owns=owns, is_uneven=is_uneven, now=now)
        term = self._active_term
        self._transfer.set_waiting_since(term.waiting_since if term is not None else None)

    def _give_to_owner(self, now: float) -> bool:
        """End our term if the owner of the partition is to lead. Returns whether that is so."""
        term = self._active_term
        if term is None or (owner := self._transfer.owner(now)) is None:
            return False
        self._transfer.mark_given(owner, now)
        self._finishes_until = now + FINISH_SECONDS
        term.give_to_owner(owner)
        return True

    def _resign_if_another_reaches_more(self, all_answer: bool | None, now: float) -> None:
        """End our term if it is stalled, some broker does not answer us, and a follower reaches all of them."""
        term = self._active_term
        if term is None or (successor := self._transfer.successor(all_answer, now)) is None:
            return
        self._transfer.mark_resigned(now)
        self._report.trouble = Ending.GAVE_WAY.value
        term.abandon(Ending.GAVE_WAY)
        self._services.send(self._report.resignation(successor))  # The term may still wait for seconds.

    def _replaceable_leader(self, all_answer: bool | None, since: float, now: float) -> str | None:
        """The leader id of another harvester's term that we can replace, as all servers answer us; None without one."""
        postgres_answers = self._services.postgres_probe.result(since)
        if not all_answer or not postgres_answers:
            return None
        if self._transfer.leads_what_we_own(now):
            self._transfer.mark_asked(now)
        return self._transfer.replaceable_leader(now)

    def _begin_term(self, now: float) -> None:
        services = self._services
        self._term = LeaderTerm(self.number, services.open_relay, self._observe, services.runtime)
        self.election.begin_term(self._term.leader_id, now)
        self._report.term_began(self._term.leader_id, services.wall_clock())
        services.observe(TakeoverBegan(self.number, self._term.leader_id))

    def _finish(self, term: LeaderTerm, now: float) -> None:
        error, self._term = term.error, None
        if now - term.began_at > CALM_SECONDS:
            self._backoff.succeeded()
        gave_way = term.ending in (Ending.GAVE_WAY, Ending.GAVE_TO_OWNER)
        # The error of a term that was cut short is a consequence of that.
        is_cause = error is not None and not gave_way and term.ending is not Ending.STEPPED_DOWN
        reason = str(error) if is_cause else term.ending.value if term.ending else None
        if term.ending is not Ending.GAVE_TO_OWNER:
            self._report.trouble = reason or self._report.trouble
        self.begin_again = error if isinstance(error, LayoutChanged | TopicMissing) else None
        replaced = isinstance(error, Fenced) or term.ending is Ending.STOOD_BACK
        at_once = isinstance(error, Fenced | OutcomeUnknown) or error is None
        retry_after = 0.0 if at_once else self._backoff.wait(self._services.jitter())
        if gave_way:
            retry_after = STAND_BACK_SECONDS
        self.election.end_term(now, by_another=replaced, retry_after=retry_after)
        if not at_once:
            self._transfer.mark_failed(now)
        if not replaced:
            self._services.send(self._report.resignation(term.successor))
        error_type = type(error).__name__ if error is not None else None
        is_planned = term.ending is Ending.GAVE_TO_OWNER and error is None
        has_led = term.phase == "leader"
        self._services.observe(TermFinished(self.number, term.leader_id, reason, error_type, is_planned, has_led))

    def _observe(self, event: HarvestEvent) -> None:
        self._report.observe(event, self._services.runtime.now())
        self._services.observe(event)

    def _send_heartbeat(self, now: float, can_replace: str | None) -> None:
        leads = self._is_at_work(now)
        if self._is_calm(now) or (self._term is None and self.election.hears_leader(now)):
            self._report.trouble = None
        heartbeat = self._report.heartbeat(
            now,
            self._phase(now),
            leads=leads,
            expects_its_own=self.election.awaits_own_heartbeat,
            stalled=self._transfer.is_stalled(now),
            can_replace=can_replace,
            owns=can_replace is not None and self._transfer.leads_what_we_own(now),
        )
        if heartbeat is not None:
            self._services.send(heartbeat)

    def _is_calm(self, now: float) -> bool:
        """Whether a term of ours has taken over, and is at work for some time. A takeover may last long and fail."""
        term = self._active_term
        return term is not None and term.phase == "leader" and now - term.began_at > CALM_SECONDS

    def _long_wait(self, now: float) -> str | None:
        """What to report of a term that waits for an answer for long; None where there is none."""
        term = self._active_term
        if term is None:
            return None
        if _is_long(term.waiting_since, now):
            return LONG_WAIT if term.phase == "leader" else LONG_TAKEOVER
        return LONG_POSTGRES_WAIT if _is_long(term.waiting_for_postgres_since, now) else None

    def _phase(self, now: float) -> Phase:
        return self._term.phase if self._term is not None and self._is_at_work(now) else "waiting"

    def _is_at_work(self, now: float) -> bool:
        """Whether we have a term that goes on, or one that finishes its transaction before the owner leads."""
        if self._term is None:
            return False
        finishes = self._term.ending is Ending.GAVE_TO_OWNER and now < self._finishes_until
        return finishes or not self._term.stopping

    def stop(self) -> None:
        """Begin to hand over."""
        if self._term is not None:
            self._term.stop()

    def abandon(self) -> None:
        """Let the term end without waiting for servers."""
        if self._term is not None:
            self._term.abandon()

    def await_end(self, timeout_seconds: float) -> bool:
        """Wait until there is no term, or it has ended. Returns whether that is so."""
        return self._term is None or self._term.join(timeout_seconds)

    def resign(self, now: float) -> None:
        """Let others lead. The term is over, or is waited for no longer."""
        if self._term is not None:
            self._finish(self._term, now)


def _is_long(since: float | None, now: float) -> bool:
    return since is not None and now - since > LONG_WAIT_SECONDS
