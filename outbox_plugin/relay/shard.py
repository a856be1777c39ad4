"""One shard's life in one harvester: follow, take over, relay, hand over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.election import Action, Election
from outbox_plugin.core.heartbeat import Heartbeat, Phase
from outbox_plugin.core.intervals import ERROR_FIRST, ERROR_LAST
from outbox_plugin.errors import Fenced, LayoutChanged, OutcomeUnknown, TopicMissing
from outbox_plugin.relay.events import (
    HarvestEvent,
    KeysHeld,
    Observer,
    RecordsIgnored,
    ShardStepped,
    TakeoverBegan,
    TermBegan,
    TermFinished,
    WindowPublished,
)
from outbox_plugin.relay.runtime import Runtime

CALM_SECONDS = 5.0  # A term that has lasted as long has got over what ended the one before it.
WAITING_INTERVAL = 1.0
HELD_SHOWN_SECONDS = 1.0  # A lane that is held back again at once is shown without a gap.
IGNORED_SHOWN_SECONDS = 60.0
STEPS_TOLD_SECONDS = 0.5


class Relay(Protocol):
    """What relays a shard for one term."""

    def take_over(self) -> None:
        """Make sure that nobody else publishes, and recover what the last leader left."""
        ...

    def run(self) -> None:
        """Relay until `stop`."""
        ...

    def stop(self) -> None:
        """Ask `run` to end."""
        ...

    def prove(self, proved: Callable[[], None]) -> None:
        """Find out soon whether we have been fenced; call `proved` if not, end if so."""
        ...


# Connects for one term: (shard, leader id, whether waiting still makes sense, observer) -> the relay, closed on exit.
OpenRelay = Callable[[int, str, Callable[[], bool], Observer], AbstractContextManager[Relay]]


class _Term:
    """A term and its thread."""

    def __init__(self, shard: int, open_relay: OpenRelay, observe: Observer, runtime: Runtime) -> None:
        self.leader_id = runtime.new_id()
        self.began_at = runtime.now()
        self.phase: Phase = "candidate"
        self.error: BaseException | None = None
        self.proved = False
        self.proving = False
        self.stopping = False
        self.stepped_down: str | None = None  # Why, where the election has ended it.
        self.stood_back = False  # It was ended before it took over, because somebody leads.
        self._abandoned = False
        self._relay: Relay | None = None
        self._opening = runtime.lock()
        self._changed = runtime.condition(self._opening)
        self._may_take_over = False
        self._task = runtime.spawn(lambda: self._live(shard, open_relay, observe), f"outbox-{shard}-publish")

    def _live(self, shard: int, open_relay: OpenRelay, observe: Observer) -> None:
        try:
            with open_relay(shard, self.leader_id, lambda: not self._abandoned, observe) as relay:
                with self._opening:
                    self._changed.wait_for(lambda: self._may_take_over or self.stopping)
                    if self.stopping:
                        return
                    self._relay = relay  # From now on, `stop` reaches it.
                relay.take_over()
                self.phase = "leader"
                if not self.stopping:
                    relay.run()
        except Exception as error:
            self.error = error

    @property
    def over(self) -> bool:
        return not self._task.is_alive()

    def take_over(self) -> None:
        """Take over as soon as the connections are open."""
        if not self._may_take_over:
            with self._opening:
                self._may_take_over = True
                self._changed.notify_all()

    def stop(self) -> None:
        with self._opening:
            self.stopping = True
            self._changed.notify_all()
            if self._relay is not None:
                self._relay.stop()

    def prove(self) -> None:
        if self._relay is not None and self.phase == "leader" and not self.proving:
            self.proving = True
            self._relay.prove(self._proven)

    def _proven(self) -> None:
        self.proved = True

    def abandon(self) -> None:
        """Wait for nothing any more: what is in a transaction is left to the log."""
        self._abandoned = True
        self.stop()

    def join(self, timeout_seconds: float) -> bool:
        self._task.join(timeout_seconds)
        return self.over


class Shard:
    """Carries out what the shard's election decides. Its methods are called by one thread, the supervisor's."""

    def __init__(
        self,
        number: int,
        election: Election,
        open_relay: OpenRelay,
        send: Callable[[Heartbeat], None],
        observe: Observer,
        runtime: Runtime,
        *,
        template: Heartbeat,
        wall_clock: Callable[[], str],
        heartbeat_interval: float,
        jitter: Callable[[], float],
        note: str | None = None,
    ) -> None:
        self.number = number
        self.election = election
        self._open_relay = open_relay
        self._send = send
        self._forward = observe
        self._runtime = runtime
        self.begin_again: LayoutChanged | TopicMissing | None = None  # Why all shards must, if they must.
        self._wall_clock = wall_clock
        self._heartbeat_interval = heartbeat_interval
        self._jitter = jitter
        self._note = note
        self._term: _Term | None = None
        self._error_pace = Backoff(ERROR_FIRST, ERROR_LAST)
        self._trouble: str | None = None
        self._published = 0
        self._recovered = 0
        self._rated = 0.0, 0
        self._held = "", 0.0  # What was held back last, and until when that is shown.
        self._ignored = "", 0.0  # Which records were ignored last, and until when that is shown.
        self._heartbeat_at = self._told_at = -1e9
        self._last = template

    def step(self, now: float) -> None:
        """Do what is to be done now, without waiting."""
        if self._term is not None:
            if self._term.over:
                self._finish(self._term, now)
            elif self._term.proved:
                self._term.proved = self._term.proving = False
                self.election.proved()
            elif self.election.may_take_over:
                self.election.took_over()
                self._term.take_over()
        self._act(self.election.tick(now), now)
        self._beat(now)
        self._tell(now)

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Action.ACQUIRE:
                self._term = _Term(self.number, self._open_relay, self._observe, self._runtime)
                self.election.began(self._term.leader_id, now)
                self._last = replace(self._last, leader_id=self._term.leader_id, since=self._wall_clock())
                self._heartbeat_at = -1e9
                self._forward(TakeoverBegan(self.number, self._term.leader_id))
            case Action.PROVE if self._term is not None:
                self._term.prove()
            case Action.STEP_DOWN if self._term is not None and not self._term.stopping:
                self._trouble = "stepped down: lost the leader topic's partition, or contact with Kafka"
                self._term.stepped_down = self._trouble
                self._term.abandon()
            case Action.STAND_BACK if self._term is not None and not self._term.stopping:
                self._term.stepped_down, self._term.stood_back = "another harvester leads", True
                self._term.abandon()
            case _:
                pass

    def _finish(self, term: _Term, now: float) -> None:
        error, self._term = term.error, None
        if now - term.began_at > CALM_SECONDS:
            self._error_pace.succeeded()
        reason = str(error) if error is not None else term.stepped_down
        self._trouble = reason or self._trouble
        self.begin_again = error if isinstance(error, LayoutChanged | TopicMissing) else None
        replaced = isinstance(error, Fenced) or term.stood_back
        at_once = isinstance(error, Fenced | OutcomeUnknown) or error is None
        retry_after = 0.0 if at_once else self._error_pace.wait(self._jitter())
        self.election.ended(now, by_another=replaced, retry_after=retry_after)
        if not replaced:
            self._send(replace(self._last, phase="resigned", trouble=self._trouble))
        error_type = type(error).__name__ if error is not None else None
        self._forward(TermFinished(self.number, term.leader_id, reason, error_type))

    def _observe(self, event: HarvestEvent) -> None:
        if isinstance(event, WindowPublished):
            self._published += event.rows
            self._trouble = None
        elif isinstance(event, KeysHeld):
            self._held = event.message(event.keys[0]), self._runtime.now() + event.seconds + HELD_SHOWN_SECONDS
        elif isinstance(event, RecordsIgnored):
            self._ignored = event.message(), self._runtime.now() + IGNORED_SHOWN_SECONDS
        elif isinstance(event, TermBegan):
            self._recovered = event.recovered
        self._forward(event)

    def _beat(self, now: float) -> None:
        leading = self._term is not None and not self._term.stopping
        calm = leading and self._term is not None and now - self._term.began_at > CALM_SECONDS
        if calm or (self._term is None and self.election.another_leads(now)):
            self._trouble = None
        listens = leading or self.election.unheard  # For heartbeats of our own.
        interval = self._heartbeat_interval if listens else WAITING_INTERVAL
        phase = self._phase
        due = now - self._heartbeat_at >= interval or (leading and phase != self._last.phase)
        if not due or not (listens or self._trouble):
            return
        self._heartbeat_at = now
        self._last = replace(
            self._last,
            phase=phase,
            published=self._published,
            records_per_second=self._rate(now),
            trouble=self._shown_trouble(now),
            recovered=self._recovered,
        )
        self._send(self._last)

    @property
    def _phase(self) -> Phase:
        return self._term.phase if self._term is not None and not self._term.stopping else "waiting"

    def _shown_trouble(self, now: float) -> str | None:
        return self._trouble or _shown(self._held, now) or _shown(self._ignored, now) or self._note

    def _tell(self, now: float) -> None:
        if now - self._told_at >= STEPS_TOLD_SECONDS:
            self._told_at = now
            trouble = self._shown_trouble(now)
            self._forward(ShardStepped(self.number, self._phase, self.election.leader_heard_at, trouble))

    def _rate(self, now: float) -> float:
        """Records per second since about a second ago."""
        at, published = self._rated
        if now - at < 1.0:
            return self._last.records_per_second
        self._rated = now, self._published
        return round((self._published - published) / (now - at), 1) if at else 0.0

    def stop(self) -> None:
        """Begin to hand over."""
        if self._term is not None:
            self._term.stop()

    def hand_over(self, now: float, patience_seconds: float) -> None:
        """Wait until the term has ended, cut it short after `patience_seconds`, and resign."""
        if self._term is not None:
            if not self._term.join(patience_seconds):
                self._term.abandon()
                self._term.join(patience_seconds)
            self._finish(self._term, now)


def _shown(notice: tuple[str, float], now: float) -> str | None:
    """What is to be told as long as its time is not over."""
    told, until = notice
    return told if now < until else None
