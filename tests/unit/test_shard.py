"""How a shard's term ends, and what is said of it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outbox_plugin.core.election import Election, ElectionTiming
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.relay.events import HarvestEvent, Observer, TermFinished
from outbox_plugin.relay.runtime import Threads
from outbox_plugin.relay.shard import Shard, ShardServices
from outbox_plugin.relay.shard_report import ShardReport
from outbox_plugin.relay.term import Relay, Term
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

    def prove(self, proved: Callable[[], None]) -> None:
        """Nobody challenges it."""


@contextmanager
def open_relay(shard: int, leader_id: str, wanted: Callable[[], bool], observe: Observer) -> Iterator[Relay]:
    yield IdleRelay()


def leading_shard(sent: list[LeaderHeartbeat], seen: list[HarvestEvent]) -> Shard:
    services = ShardServices(open_relay, sent.append, seen.append, Threads(), lambda: "now", lambda: 0.0)
    template = LeaderHeartbeat(0, "waiting", "", "host-1", "host", 1, "now", "incarnation", "place")
    election = Election(ElectionTiming(receive_deadline=5.0), early_takeover=True)
    shard = Shard(0, election, ShardReport(template, 0.3), services)
    shard.election.set_ownership(True)
    shard.step(0.0)
    return shard


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
    assert "stepped down" in str(the_end(shard, seen, 5.1).reason)
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

    def leads() -> bool:
        shard.step(0.7)
        return sent[-1].phase == "leader"

    eventually(leads, 10)
    shard.stop()
    shard.hand_over(1.0, 10.0)


def test_a_stop_that_was_asked_for_needs_no_reason() -> None:
    seen: list[HarvestEvent] = []
    shard = leading_shard([], seen)
    shard.stop()
    shard.hand_over(1.0, 10.0)
    assert [event.reason for event in seen if isinstance(event, TermFinished)] == [None]


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
        term = Term(0, open_failing, lambda _: None, Threads())
        term.take_over()
        eventually(lambda: term.is_over, 10)
        assert str(term.error) == "Kafka does not answer"
        assert len(relay.clients) == 2
        assert [client() for client in relay.clients] == [None, None]
    finally:
        gc.enable()
