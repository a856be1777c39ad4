"""The leader's network to one server stalls, swallows packets or is half open; another harvester goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_plugin import Settings
from outbox_plugin.bench.injection import reached
from outbox_plugin.bench.proxy import DIRECTIONS, Direction
from outbox_plugin.bench.servers import Servers
from outbox_plugin.bench.takeover import longest_gap
from outbox_plugin.bench.temporary_outbox import temporary_outbox
from outbox_plugin.embedded.cluster import NODES
from tests.chaos.loading import Load, load
from tests.support import PATIENCE, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.long]

GONE_SECONDS = 40.0
MEANWHILE_SECONDS = 30.0
SILENCE_SECONDS = 5.0
TARGETS = {"Postgres": 0, "Kafka": 1}


@pytest.fixture(scope="module")
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Servers, Settings]]:
    """Servers of this module's own, and two ways to them."""
    servers = Servers(tmp_path_factory.mktemp("network"), print, harvesters=2)
    with servers.running() as settings:
        yield servers, settings


@pytest.fixture
def servers(own_servers: tuple[Servers, Settings]) -> Servers:
    return own_servers[0]


@pytest.fixture(params=["exactly-once", "at-least-once"])
def settings(own_servers: tuple[Servers, Settings], request: pytest.FixtureRequest) -> Iterator[Settings]:
    with temporary_outbox(own_servers[1]) as settings:
        yield settings.model_copy(update={"delivery": request.param})


@pytest.fixture
def running(servers: Servers, settings: Settings, tmp_path: Path) -> Iterator[Load]:
    """Load from two harvesters, each on its own way."""

    def restore() -> None:
        for route in servers.routes:
            for proxy in route.proxies:
                proxy.restore()

    slots = [servers.through(route, settings) for route in servers.routes]
    with load(settings, tmp_path, slots=slots, restore=restore) as running:
        yield running


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("server", TARGETS)
def test_packets_of_one_direction_are_gone_for_40_seconds(
    servers: Servers, running: Load, server: str, direction: Direction
) -> None:
    proxies, _ = reached(servers.routes[running.leader()], TARGETS[server])
    back_at = time.monotonic() + GONE_SECONDS
    for proxy in proxies:
        proxy.discard(direction)
    running.flows(MEANWHILE_SECONDS)
    while time.monotonic() < back_at:
        running.flows(MEANWHILE_SECONDS)
    for proxy in proxies:
        proxy.restore()
    running.flows()


@pytest.mark.parametrize("broker", range(NODES))
def test_one_broker_does_not_answer_the_leader(servers: Servers, running: Load, broker: int) -> None:
    """Whatever the broker leads and coordinates; the other brokers do answer, and all answer the standby."""
    leader = running.leader()
    began = time.monotonic()
    servers.routes[leader].brokers[broker].hold(*DIRECTIONS)
    eventually(lambda: running.fleet.leader() not in (None, leader), MEANWHILE_SECONDS)
    running.flows(MEANWHILE_SECONDS)
    silence = longest_gap(running.reader.arrivals, began)
    print(f"{silence:.2f} s of silence")
    assert silence < SILENCE_SECONDS * PATIENCE
    servers.routes[leader].brokers[broker].restore()
    running.flows()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("server", TARGETS)
def test_what_is_held_for_long_arrives_when_nobody_waits_for_it_any_more(
    servers: Servers, running: Load, server: str, direction: Direction
) -> None:
    proxies, _ = reached(servers.routes[running.leader()], TARGETS[server])
    for proxy in proxies:
        proxy.hold(direction)
    running.flows(MEANWHILE_SECONDS)  # Another one leads.
    for proxy in proxies:
        proxy.restore()
    running.flows()


@pytest.mark.parametrize("server", TARGETS)
def test_connections_are_half_open(servers: Servers, running: Load, server: str) -> None:
    """The server has forgotten them; nobody tells the leader. Twice: the second time, it may have led again."""
    for _ in range(2):
        proxies, _ = reached(servers.routes[running.leader()], TARGETS[server])
        for proxy in proxies:
            proxy.half_open()
        running.flows(MEANWHILE_SECONDS)
        for proxy in proxies:
            proxy.restore()
        running.flows()


@pytest.mark.parametrize("server", TARGETS)
def test_answers_are_held_now_and_then(servers: Servers, running: Load, server: str) -> None:
    """For a short time, so that the leader goes on: what it asked was done, and it does not know for a while."""
    for milliseconds in (20, 100, 300, 700, 1_500):
        proxies, _ = reached(servers.routes[running.leader()], TARGETS[server])
        for proxy in proxies:
            proxy.hold("to client")
        time.sleep(milliseconds / 1_000)  # That is the fault.
        for proxy in proxies:
            proxy.restore()
        running.flows()


@pytest.mark.parametrize("server", TARGETS)
def test_connections_are_cut_again_and_again(servers: Servers, running: Load, server: str) -> None:
    for _ in range(10):
        proxies, _ = reached(servers.routes[running.leader()], TARGETS[server])
        for proxy in proxies:
            proxy.cut()
        running.flows()
