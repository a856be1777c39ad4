"""How a shard's term ends, and what is said of it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from outbox_plugin.core.election import Election, ElectionTiming
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.relay.events import HarvestEvent, Observer, ShardStepped, TermFinished
from outbox_plugin.relay.leader_term import Ending, LeaderTerm, OpenRelay, Relay
from outbox_plugin.relay.runtime import Threads
from outbox_plugin.relay.server_probe import ServerProbe
from outbox_plugin.relay.shard import LONG_POSTGRES_WAIT, LONG_TAKEOVER, LONG_WAIT, Shard, ShardServices
from outbox_plugin.relay.shard_report import ShardReport
from tests.support import eventually


class IdleRelay:
    """A relay with nothing to do: it fails at nothing, and so notices nothing."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def take_over(self) -> None:
        """Nothing is left to recover."""

    def run(self) -> None:
        assert self._stopped.wait(90)

    def stop(self) -> None:
        self._stopped.set()

    waiting_since: float | None = None
    waiting_for_postgres_since: float | None = None

    def prove(self, proved: Callable[[], None]) -> None:
        """Nobody challenges it."""


@contextmanager
def open_relay(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
    yield IdleRelay()


def leading_shard(
    sent: list[LeaderHeartbeat],
    seen: list[HarvestEvent],
    opens: OpenRelay = open_relay,
    all_brokers_answer: Callable[[], bool] = lambda: True,
    runtime: Threads | None = None,
) -> Shard:
    probe = ServerProbe(all_brokers_answer, Clock())
    services = ShardServices(
        opens, sent.append, seen.append, runtime or Threads(), lambda: "now", lambda: 0.0, probe, probe
    )
    template = LeaderHeartbeat(0, "waiting", "", "host-1", "host", 1, "now", "incarnation", "place")
    election = Election(ElectionTiming(receive_deadline=5.0), early_takeover=True)
    shard = Shard(0, election, ShardReport(template, 0.3), services)
    shard.election.set_ownership(True)
    shard.step(0.0)
    return shard


def let_lead(shard: Shard, sent: list[LeaderHeartbeat], now: float) -> None:
    """Wait until the shard's term has taken over, which another thread does."""

    def leads() -> bool:
        shard.step(now)
        return sent[-1].phase == "leader"

    eventually(leads, 10)


def the_end(shard: Shard, seen: list[HarvestEvent], now: float) -> TermFinished:
    def finished() -> list[TermFinished]:
        shard.step(now)
        return [event for event in seen if isinstance(event, TermFinished)]

    eventually(finished, 10)
    return finished()[0]


def test_a_leader_that_hears_nothing_of_itself_says_why_it_steps_down() -> None:
    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    shard = leading_shard(sent, seen)
    shard.election.set_ownership(False)
    end = the_end(shard, seen, 5.1)
    assert ("stepped down" in str(end.reason), end.has_led) == (True, False)
    assert (sent[-1].phase, "stepped down" in str(sent[-1].trouble)) == ("resigned", True)


def test_a_candidate_takes_over_once_it_hears_itself() -> None:
    """One that is cut off from the leader topic must not fence a leader that it cannot hear."""
    sent: list[LeaderHeartbeat] = []
    shard = leading_shard(sent, [])
    for tenth in range(1, 6):
        shard.step(tenth / 10)
        time.sleep(0.01)
    assert {each.phase for each in sent} == {"candidate"}
    shard.election.receive(sent[-1], 0.6)
    let_lead(shard, sent, 0.7)
    shard.stop()
    assert shard.await_end(10.0)
    shard.resign(1.0)


class SettableClock(Threads):
    """Real threads, at a time that a test sets."""

    time = 0.0

    def now(self) -> float:
        return self.time


class SlowTakeover(IdleRelay):
    """Its takeover lasts until it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Event()

    def take_over(self) -> None:
        self.began.set()
        assert self._stopped.wait(90)
        raise LogUnavailable("Kafka: away")


def test_what_a_leader_that_steps_down_meets_at_its_end_does_not_hide_why_it_does() -> None:
    class FailsAtItsEnd(IdleRelay):
        def run(self) -> None:
            super().run()
            raise LogUnavailable("Kafka had not acknowledged what was sent")

    @contextmanager
    def opens(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
        yield FailsAtItsEnd()

    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    shard = leading_shard(sent, seen, opens)
    shard.election.receive(sent[-1], 0.1)
    let_lead(shard, sent, 0.2)
    end = the_end(shard, seen, 5.3)
    assert ("stepped down" in str(end.reason), end.has_led) == (True, True)


@pytest.mark.parametrize(("phase", "trouble"), [("candidate", "stepped down"), ("leader", "None")])
def test_trouble_ends_when_another_leads_and_not_while_it_tries_to(phase: Phase, trouble: str) -> None:
    """Where nobody can take over, harvesters try in turn. Each would hide what the other one has met."""
    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    shard = leading_shard(sent, seen)
    the_end(shard, seen, 5.1)
    shard.receive(replace(sent[-1], phase=phase, leader_id="another", instance="host-2"), 5.2)
    shard.step(5.3)
    assert trouble in str(shard._report.trouble)


def test_a_takeover_that_lasts_long_does_not_end_the_trouble_of_the_term_before_it() -> None:
    """Nobody has published anything since."""
    relays: list[SlowTakeover] = []

    @contextmanager
    def opens(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
        relays.append(SlowTakeover())
        if len(relays) == 1:
            relays[0].stop()
        yield relays[-1]

    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    clock = SettableClock()
    shard = leading_shard(sent, seen, opens, runtime=clock)
    shard.election.receive(sent[-1], 0.1)
    the_end(shard, seen, 0.2)
    for tenth in range(3, 100):
        clock.time = tenth / 10
        shard.election.receive(sent[-1], clock.time)
        shard.step(clock.time)
        if shard.election.may_take_over:
            eventually(lambda: len(relays) == 2 and relays[1].began.is_set(), 10)
    assert (sent[-1].phase, sent[-1].trouble) == ("candidate", "Kafka: away")
    shard.stop()
    assert shard.await_end(10.0)
    shard.resign(10.0)


def test_a_stop_that_was_asked_for_needs_no_reason() -> None:
    seen: list[HarvestEvent] = []
    shard = leading_shard([], seen)
    shard.stop()
    assert shard.await_end(10.0)
    shard.resign(1.0)
    assert [event.reason for event in seen if isinstance(event, TermFinished)] == [None]


class Clock(Threads):
    """Real threads, at a time that is far ahead of what any test passes to a shard."""

    def now(self) -> float:
        return 1e9


def stalled_shard(
    sent: list[LeaderHeartbeat], seen: list[HarvestEvent], *, all_brokers_answer: bool
) -> tuple[Shard, LeaderHeartbeat]:
    """A leader that has waited for Kafka since 1.0, and what a follower says who can replace it. It is 2.0."""
    relay = IdleRelay()

    @contextmanager
    def opens(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
        yield relay

    shard = leading_shard(sent, seen, opens, lambda: all_brokers_answer)
    shard.receive(sent[-1], 0.1)
    let_lead(shard, sent, 0.9)
    relay.waiting_since = 1.0
    shard.step(2.0)
    assert sent[-1].stalled
    offer = replace(sent[-1], phase="waiting", leader_id="", instance="other", can_replace=sent[-1].leader_id)
    return shard, offer


def test_a_stalled_leader_gives_way_to_a_follower_whom_all_brokers_answer() -> None:
    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    shard, offer = stalled_shard(sent, seen, all_brokers_answer=False)
    shard.receive(offer, 2.1)

    def has_resigned() -> bool:
        shard.step(2.2)
        return sent[-1].phase == "resigned"

    eventually(has_resigned, 10)
    assert sent[-1].successor == "other"
    assert the_end(shard, seen, 2.3).reason == Ending.GAVE_WAY.value
    shard.step(5.2)
    assert shard.election.leader_id is None  # The others go first, although it owns the partition.
    shard.step(5.4)
    assert sent[-1].phase == "candidate"
    shard.stop()
    assert shard.await_end(10.0)
    shard.resign(6.0)


@pytest.mark.parametrize("all_brokers_answer", [True, None])
def test_a_stalled_leader_goes_on_where_nobody_could_do_better(all_brokers_answer: bool | None) -> None:
    """All brokers answer it, so Kafka itself is slow; or no follower is answered by all of them."""
    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    shard, offer = stalled_shard(sent, seen, all_brokers_answer=bool(all_brokers_answer))
    for tenth in range(1, 20):
        if all_brokers_answer:
            shard.receive(offer, 2.0 + tenth / 10)
        shard.step(2.0 + tenth / 10)
        time.sleep(0.01)
    assert {each.phase for each in sent} == {"candidate", "leader"}
    shard.stop()
    assert shard.await_end(10.0)
    shard.resign(4.0)


@pytest.mark.parametrize(
    ("waits", "said"), [("waiting_since", LONG_WAIT), ("waiting_for_postgres_since", LONG_POSTGRES_WAIT)]
)
def test_a_leader_that_waits_for_a_server_for_long_says_so_until_it_is_answered(waits: str, said: str) -> None:
    """It may take half a minute until it gives up, or Kafka answers after all. A lock in Postgres may stay for ever."""
    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    relay = IdleRelay()

    @contextmanager
    def opens(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
        yield relay

    shard = leading_shard(sent, seen, opens)
    shard.receive(sent[-1], 0.1)
    let_lead(shard, sent, 0.9)

    def trouble(now: float) -> str | None:
        shard.receive(sent[-1], now)
        shard.step(now)
        assert [each.trouble for each in seen if isinstance(each, ShardStepped)][-1] == sent[-1].trouble
        return sent[-1].trouble

    setattr(relay, waits, 1.0)
    assert trouble(5.9) is None
    assert trouble(6.5) == said
    setattr(relay, waits, 6.9)
    assert trouble(7.5) is None
    shard.stop()
    assert shard.await_end(10.0)
    shard.resign(8.0)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_takeover_that_lasts_long_says_so_unless_more_is_known(is_first: bool) -> None:
    """What ended the last attempt names a cause."""
    sent: list[LeaderHeartbeat] = []
    relay = SlowTakeover()
    relay.waiting_since = 1.0

    @contextmanager
    def opens(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
        yield relay

    shard = leading_shard(sent, [], opens)
    shard._report.trouble = None if is_first else "Kafka: away"
    shard.receive(sent[-1], 0.1)
    shard.step(0.9)
    assert relay.began.wait(90)
    for second in (3.0, 7.0):
        shard.receive(sent[-1], second)
        shard.step(second)
    assert (sent[-1].phase, sent[-1].trouble) == ("candidate", LONG_TAKEOVER if is_first else "Kafka: away")
    shard.stop()
    assert shard.await_end(10.0)
    shard.resign(8.0)


def test_a_follower_whom_all_brokers_answer_offers_to_replace_a_stalled_leader() -> None:
    sent: list[LeaderHeartbeat] = []
    probe = ServerProbe(lambda: True, Clock())
    services = ShardServices(
        open_relay, sent.append, lambda _: None, Threads(), lambda: "now", lambda: 0.0, probe, probe
    )
    template = LeaderHeartbeat(0, "waiting", "", "host-1", "host", 1, "now", "incarnation", "place")
    shard = Shard(0, Election(ElectionTiming(), early_takeover=True), ShardReport(template, 0.3), services)
    leader = replace(template, phase="leader", leader_id="other", instance="host-2")
    shard.receive(leader, 1.0)
    shard.step(1.1)
    assert sent == []
    shard.receive(replace(leader, stalled=True), 1.2)

    def has_offered() -> bool:
        shard.step(1.3)
        return bool(sent)

    eventually(has_offered, 10)
    assert [(each.phase, each.can_replace) for each in sent] == [("waiting", "other")]
    shard.receive(leader, 1.4)
    shard.step(2.3)
    assert len(sent) == 1


def test_an_owner_offers_to_replace_who_leads_its_shard_and_who_leads_it_gives_way() -> None:
    said: list[LeaderHeartbeat] = []
    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    shard = leading_shard(sent, seen)
    shard.receive(sent[-1], 0.1)
    let_lead(shard, sent, 0.2)
    shard.election.set_ownership(False)
    services = ShardServices(
        open_relay,
        said.append,
        lambda _: None,
        Threads(),
        lambda: "now",
        lambda: 0.0,
        ServerProbe(lambda: True, Clock()),
        ServerProbe(lambda: True, Clock()),
    )
    template = LeaderHeartbeat(0, "waiting", "", "host-2", "host", 2, "now", "incarnation", "place")
    owner = Shard(0, Election(ElectionTiming(), early_takeover=True), ShardReport(template, 0.3), services)
    owner.election.set_ownership(True)
    owner.receive(sent[-1], 0.3)
    services.leaders.receive(replace(sent[-1], shard=1), 0.3)
    owner.step(0.4)
    owner.receive(sent[-1], 3.3)
    services.leaders.receive(replace(sent[-1], shard=1), 3.3)

    def has_offered() -> bool:
        owner.step(3.45)
        return bool(said and said[-1].can_replace)

    eventually(has_offered, 10)
    assert (said[-1].phase, said[-1].can_replace, said[-1].owns) == ("waiting", sent[-1].leader_id, True)
    shard.receive(sent[-1], 3.3)
    shard.receive(said[-1], 3.5)
    end = the_end(shard, seen, 3.6)
    assert (end.reason, end.is_planned) == (Ending.GAVE_TO_OWNER.value, True)
    assert (sent[-1].phase, sent[-1].successor, sent[-1].trouble) == ("resigned", "host-2", None)
    owner.receive(sent[-1], 3.7)
    owner.step(3.7)
    assert said[-1].phase == "candidate"
    owner.stop()
    assert owner.await_end(10.0)
    owner.resign(4.0)


class BusyRelay(IdleRelay):
    """A relay whose transaction lasts until `finish`."""

    def stop(self) -> None:
        """The transaction is finished first."""

    def finish(self) -> None:
        self._stopped.set()


def test_a_leader_that_gives_way_to_the_owner_counts_as_the_leader_while_it_finishes_but_not_for_long() -> None:
    sent: list[LeaderHeartbeat] = []
    seen: list[HarvestEvent] = []
    relay = BusyRelay()

    @contextmanager
    def opens(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
        yield relay

    shard = leading_shard(sent, seen, opens)
    shard.receive(sent[-1], 0.1)
    let_lead(shard, sent, 0.2)
    shard.election.set_ownership(False)
    claim = replace(
        sent[-1], phase="waiting", leader_id="", instance="host-2", can_replace=sent[-1].leader_id, owns=True
    )
    shard.receive(claim, 1.0)
    for second in (1.0, 2.0, 3.0, 5.9):
        sent.clear()
        shard.step(second)
        assert [each.phase for each in sent] == ["leader"]
    sent.clear()
    shard.step(6.1)
    assert not sent
    relay.finish()
    assert the_end(shard, seen, 6.2).reason == Ending.GAVE_TO_OWNER.value
    assert (sent[-1].phase, sent[-1].successor) == ("resigned", "host-2")


def test_a_follower_leaves_the_shard_to_the_successor_that_the_leader_has_named() -> None:
    sent: list[LeaderHeartbeat] = []
    probe = ServerProbe(lambda: True, Clock())
    services = ShardServices(
        open_relay, sent.append, lambda _: None, Threads(), lambda: "now", lambda: 0.0, probe, probe
    )
    template = LeaderHeartbeat(0, "waiting", "", "host-1", "host", 1, "now", "incarnation", "place")
    for successor, first_at in (("host-3", 2.1), ("host-1", 1.2)):
        shard = Shard(0, Election(ElectionTiming(), early_takeover=True), ShardReport(template, 0.3), services)
        shard.receive(replace(template, phase="leader", leader_id="other", instance="host-2"), 1.0)
        resigned = replace(template, phase="resigned", leader_id="other", instance="host-2", successor=successor)
        shard.receive(resigned, 1.1)
        shard.step(first_at - 0.1)
        assert shard.election.leader_id is None
        shard.step(first_at)
        assert sent[-1].phase == "candidate"
        shard.stop()
        assert shard.await_end(10.0)
        shard.resign(3.0)


class Client:
    """Stands for a client of Kafka, with threads and connections."""


class FailingRelay(IdleRelay):
    """Its takeover fails in a call that has a client as a local variable, and so does what the error comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[weakref.ref[Client]] = []

    def take_over(self) -> None:
        try:
            self._ask()
        except OSError as error:
            client = Client()
            self.clients.append(weakref.ref(client))
            raise RuntimeError("Kafka does not answer") from error

    def _ask(self) -> None:
        client = Client()
        self.clients.append(weakref.ref(client))
        raise OSError("timed out")


def test_the_error_of_a_term_keeps_no_client_until_garbage_is_collected() -> None:
    relay = FailingRelay()

    @contextmanager
    def open_failing(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
        yield relay

    gc.disable()
    try:
        term = LeaderTerm(0, open_failing, lambda _: None, Threads())
        term.take_over()
        eventually(lambda: term.is_over, 10)
        assert str(term.error) == "Kafka does not answer"
        assert len(relay.clients) == 2
        assert [client() for client in relay.clients] == [None, None]
    finally:
        gc.enable()
