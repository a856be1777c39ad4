"""What one turn of a harvester's main loop tells its shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import pytest

from outbox_plugin.core.election import Election, ElectionTiming
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.relay.server_probe import ServerProbe
from outbox_plugin.relay.shard import Shard, ShardServices
from outbox_plugin.relay.shard_report import ShardReport
from outbox_plugin.relay.supervisor import HAND_OVER_SECONDS, LISTEN_SECONDS, Supervisor
from tests.clock import Clock
from tests.support import eventually
from tests.unit.test_shard import open_relay

IDENTITY = OutboxIdentity("incarnation", "place")


class SlowMembership:
    """It owns the partition, hears what it says itself, and every turn takes so many seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self.seconds = seconds
        self.owns = {0}
        self.waits: list[float] = []
        self.said: list[LeaderHeartbeat] = []
        self.unheard: list[LeaderHeartbeat] = []

    def owned(self) -> set[int]:
        return self.owns

    def receive(self, wait_seconds: float) -> Iterator[LeaderHeartbeat]:
        self._clock.time += self.seconds
        self.waits.append(wait_seconds)
        heard, self.unheard = self.unheard, []
        yield from heard

    def take_vacant(self) -> set[int]:
        return set()

    def take_unsigned_heartbeat(self) -> LeaderHeartbeat | None:
        return None

    def check_topic(self) -> None:
        """It is there."""

    def check_progress_topic(self) -> None:
        """Nobody recreates it."""

    def send(self, heartbeat: LeaderHeartbeat) -> None:
        self.said.append(heartbeat)
        self.unheard.append(heartbeat)

    def leave(self, timeout_seconds: float) -> None:
        """Nothing is to be left."""


def harvester(seconds: float, *, early_takeover: bool = True) -> tuple[Supervisor, SlowMembership]:
    clock = Clock()
    membership = SlowMembership(clock, seconds)
    probe = ServerProbe(lambda: True, clock)
    services = ShardServices(
        open_relay, membership.send, lambda _: None, clock, lambda: "now", lambda: 0.0, probe, probe
    )
    template = LeaderHeartbeat(0, "waiting", "", "host-1", "host", 1, "now", "incarnation", "place")
    election = Election(ElectionTiming(), early_takeover=early_takeover)
    shard = Shard(0, election, ShardReport(template, 0.3), services)
    return Supervisor(membership, [shard], IDENTITY, 0, clock), membership


def test_a_harvester_whose_every_turn_takes_long_leads() -> None:
    """A busy or slow machine: it is not stopped again and again."""
    for early_takeover in (True, False):
        supervisor, membership = harvester(1.5, early_takeover=early_takeover)

        def leads() -> bool:
            supervisor._turn()  # noqa: B023
            return membership.said != [] and membership.said[-1].phase == "leader"  # noqa: B023

        eventually(leads, 10)
        supervisor._hand_over()


def test_a_harvester_that_was_stopped_listens_first() -> None:
    supervisor, membership = harvester(60.0)
    supervisor._turn()
    membership.seconds = 0.1
    for _ in range(9):
        supervisor._turn()
        assert {each.phase for each in membership.said} <= {"waiting"}

    def competes() -> bool:
        supervisor._turn()
        return membership.said[-1].phase == "candidate"

    eventually(competes, 10)
    supervisor._hand_over()


def test_a_harvester_that_has_just_started_looks_often_whether_it_is_to_lead() -> None:
    supervisor, membership = harvester(0.3)
    membership.owns = set()
    for _ in range(6):
        supervisor._turn()
    assert membership.waits == 4 * [0.01] + 2 * [0.1]
    supervisor._hand_over()


def test_a_harvester_that_leads_soon_after_its_start_does_not_look_so_often_any_more() -> None:
    supervisor, membership = harvester(0.001)

    def leads() -> bool:
        supervisor._turn()
        return membership.said != [] and membership.said[-1].phase == "leader"

    eventually(leads, 10)
    assert membership.waits[0] == 0.01
    supervisor._turn()
    assert membership.waits[-1] == 0.1
    supervisor._hand_over()


class EndingShard:
    """Its term ends so many seconds after it was asked to, or at once where it is abandoned."""

    def __init__(self, number: int, clock: Clock, seconds: float) -> None:
        self.number = number
        self._clock = clock
        self._seconds = seconds
        self._ends_at = math.inf
        self.abandoned_at: float | None = None
        self.resigned_at: float | None = None

    def stop(self) -> None:
        self._ends_at = self._clock.time + self._seconds

    def abandon(self) -> None:
        self._ends_at = self.abandoned_at = self._clock.time

    def await_end(self, timeout_seconds: float) -> bool:
        self._clock.time = max(self._clock.time, min(self._clock.time + timeout_seconds, self._ends_at))
        return self._clock.time >= self._ends_at

    def resign(self, now: float) -> None:
        self.resigned_at = now


def test_terms_that_servers_hold_up_are_cut_short_together_and_delay_no_other_shard() -> None:
    clock = Clock()
    shards: list[Any] = [EndingShard(number, clock, seconds) for number, seconds in enumerate([99.0, 99.0, 0.5, 99.0])]
    Supervisor(cast(Any, SlowMembership(clock, 0.1)), shards, IDENTITY, 0, clock)._hand_over()
    assert shards[2].abandoned_at is None
    assert shards[2].resigned_at == pytest.approx(0.5, abs=LISTEN_SECONDS)
    for held_up in (shards[0], shards[1], shards[3]):
        assert held_up.abandoned_at == pytest.approx(HAND_OVER_SECONDS, abs=LISTEN_SECONDS)
        assert held_up.resigned_at == pytest.approx(HAND_OVER_SECONDS, abs=2 * LISTEN_SECONDS)
