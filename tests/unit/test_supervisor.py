"""What one turn of a harvester's main loop tells its shards."""

from __future__ import annotations

from collections.abc import Iterator

from outbox_plugin.core.election import Election, ElectionTiming
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.relay.server_probe import ServerProbe
from outbox_plugin.relay.shard import Shard, ShardServices
from outbox_plugin.relay.shard_report import ShardReport
from outbox_plugin.relay.supervisor import Supervisor
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
