"""Three real brokers that die, come back and change places under load: order and exactly-once hold, nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from outbox_plugin import Settings
from outbox_plugin.bench.chaos import Servers, create_topic
from outbox_plugin.bench.fleet import END_SECONDS, Fleet
from outbox_plugin.bench.judge import judge
from outbox_plugin.bench.reader import LiveReader, read_until
from outbox_plugin.bench.scratch import scratch_outbox
from outbox_plugin.bench.writer import Mix, Writer
from outbox_plugin.embedded.cluster import ClusterNode, Coordinated, EmbeddedCluster
from tests.harvesting import drained
from tests.support import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.long]

FLOWS_SECONDS = 60.0


@pytest.fixture(scope="module")
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedCluster, Settings]]:
    """Three brokers and a Postgres of this module's own, all of which are up when a test begins."""
    servers = Servers(tmp_path_factory.mktemp("brokers"), print)
    with servers.running() as settings:
        yield servers.cluster, settings


@pytest.fixture
def cluster(own_servers: tuple[EmbeddedCluster, Settings]) -> EmbeddedCluster:
    return own_servers[0]


@pytest.fixture
def settings(own_servers: tuple[EmbeddedCluster, Settings]) -> Iterator[Settings]:
    with scratch_outbox(own_servers[1]) as settings:
        yield settings


class Load:
    """A writer, harvesters, and a reader that sees what they do."""

    def __init__(self, settings: Settings, folder: Path, mix: Mix) -> None:
        self.topic = f"{settings.group}-events"
        create_topic(settings, self.topic, 6)
        self.fleet = Fleet(settings, 2, folder)
        self.writer = Writer(settings, self.topic, mix, seed=1)
        self.reader = LiveReader(settings, self.topic)

    def flows(self) -> None:
        """Wait until what is written from now on arrives."""
        written = self.writer.rows + 100
        assert self.reader.wait_for(lambda arrivals: len(arrivals) > written, FLOWS_SECONDS), "nothing flows any more"

    def leader(self) -> int:
        """Wait for a leader; the number of its seat."""
        eventually(lambda: self.fleet.leader() is not None, FLOWS_SECONDS)
        leader = self.fleet.leader()
        assert leader is not None
        return leader


@contextmanager
def load(cluster: EmbeddedCluster, settings: Settings, folder: Path, mix: Mix | None = None) -> Iterator[Load]:
    """Load from two harvesters for as long as the body runs; then all must have arrived once, in order."""
    running = Load(settings, folder, mix or Mix())
    with running.reader.reading(), running.fleet.running():
        try:
            with running.writer.writing():
                running.flows()
                yield running
            drained(settings)
        finally:
            cluster.revive()  # For the next test, whatever became of this one.
    committed = running.writer.committed()
    rows = sum(each.rows for each in committed.values())
    verdict = judge(committed, read_until(settings, running.topic, lambda seen: len(seen) >= rows, 60))
    assert verdict.clean, verdict
    assert running.fleet.failures == []
    assert "Traceback" not in running.fleet.log


def moved(cluster: EmbeddedCluster, topic: str, partition: int, before: ClusterNode) -> bool:
    return cluster.leader(topic, partition) is not before


def test_one_broker_after_the_other_is_killed(cluster: EmbeddedCluster, settings: Settings, tmp_path: Path) -> None:
    with load(cluster, settings, tmp_path) as running:
        for node in cluster.nodes:
            node.kill()
            running.flows()
            cluster.restart(node)
            running.flows()


def test_partitions_change_their_leaders(cluster: EmbeddedCluster, settings: Settings, tmp_path: Path) -> None:
    """Away when the leader is shut down in good order, back by a preferred election, with all brokers up."""
    with load(cluster, settings, tmp_path, Mix(rows_per_second=1_500)) as running:
        for partition in range(2):
            first = cluster.leader(running.topic, partition)
            first.stop()
            eventually(partial(moved, cluster, running.topic, partition, first), 30)
            running.flows()
            cluster.restart(first)
            for topic in (running.topic, f"{settings.group}-progress", f"{settings.group}-leader"):
                cluster.elect_preferred(topic)
            assert cluster.leader(running.topic, partition) is first
            running.flows()


@pytest.mark.parametrize(("what", "suffix"), [("transactional id", "-0"), ("group", "-leader")])
def test_a_coordinator_moves(
    cluster: EmbeddedCluster, settings: Settings, tmp_path: Path, what: Coordinated, suffix: str
) -> None:
    """Of the transactions, or of the election: away by a kill, and back by a preferred election."""
    with load(cluster, settings, tmp_path) as running:
        first = cluster.coordinator(what, settings.group + suffix)
        first.kill()
        eventually(lambda: cluster.coordinator(what, settings.group + suffix) is not first, 30)
        running.flows()
        cluster.restart(first)
        running.flows()
        cluster.elect_preferred("__transaction_state" if what == "transactional id" else "__consumer_offsets")
        assert cluster.coordinator(what, settings.group + suffix) is first
        running.flows()


def test_sigterm_while_a_broker_dies(cluster: EmbeddedCluster, settings: Settings, tmp_path: Path) -> None:
    """In the middle of transactions whose coordinator goes away: the harvester ends, and the other one goes on."""
    with load(cluster, settings, tmp_path, Mix(rows_per_second=2_000)) as running:
        leader = running.leader()
        node = cluster.coordinator("transactional id", f"{settings.group}-0")
        node.kill()
        running.fleet.terminate(leader)
        eventually(lambda: running.fleet.ended.total() == 1, END_SECONDS)
        assert running.fleet.ended[0] == 1
        running.flows()
        cluster.restart(node)
        running.flows()


def test_sigterm_while_nothing_can_be_written(cluster: EmbeddedCluster, settings: Settings, tmp_path: Path) -> None:
    """Two of three brokers are gone, so that no transaction can end: the harvesters end, and leave it to the next."""
    with load(cluster, settings, tmp_path, Mix(rows_per_second=2_000)) as running:
        leader = running.leader()
        for node in cluster.nodes[:2]:
            node.kill()
        running.fleet.terminate(leader)
        running.fleet.terminate(1 - leader)
        eventually(lambda: running.fleet.ended[0] == 2, END_SECONDS)
        cluster.revive()
        running.flows()
