"""Three real brokers that die, come back and change places under load: order and delivery hold, nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from outbox_plugin import Settings
from outbox_plugin.bench.fleet import END_SECONDS
from outbox_plugin.bench.servers import Servers
from outbox_plugin.bench.temporary_outbox import temporary_outbox
from outbox_plugin.bench.writer import Mix
from outbox_plugin.embedded.cluster import ClusterNode, Coordinated, EmbeddedCluster
from tests.chaos import loading
from tests.chaos.loading import Load
from tests.support import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.long]

OWN_TOPICS = {"exactly-once": ["{group}-progress", "{group}-leader"], "at-least-once": ["{group}-leader"]}


@pytest.fixture(scope="module")
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedCluster, Settings]]:
    """Three brokers and a Postgres of this module's own, all of which are up when a test begins."""
    servers = Servers(tmp_path_factory.mktemp("brokers"), print)
    with servers.running() as settings:
        yield servers.cluster, settings


@pytest.fixture
def cluster(own_servers: tuple[EmbeddedCluster, Settings]) -> EmbeddedCluster:
    return own_servers[0]


@pytest.fixture(params=["exactly-once", "at-least-once"])
def settings(own_servers: tuple[EmbeddedCluster, Settings], request: pytest.FixtureRequest) -> Iterator[Settings]:
    with temporary_outbox(own_servers[1]) as settings:
        yield settings.model_copy(update={"delivery": request.param})


@contextmanager
def load(cluster: EmbeddedCluster, settings: Settings, folder: Path, mix: Mix | None = None) -> Iterator[Load]:
    """See `loading.load`; afterwards all brokers are up again."""
    with loading.load(settings, folder, mix, restore=cluster.revive) as running:
        yield running


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
            for topic in [running.topic, *OWN_TOPICS[settings.delivery]]:
                cluster.elect_preferred(topic.format(group=settings.group))
            eventually(partial(leads_again, cluster, running.topic, partition, first), 30)
            running.flows()


def leads_again(cluster: EmbeddedCluster, topic: str, partition: int, node: ClusterNode) -> bool:
    return elected(cluster, topic) and cluster.leader(topic, partition) is node


def elected(cluster: EmbeddedCluster, topic: str) -> bool:
    """Ask for the preferred leaders: a replica that is not in sync yet is not elected, so ask again."""
    with suppress(KafkaException):
        cluster.elect_preferred(topic)
        return True
    return False


def preferred_ones_lead(admin: AdminClient, topic: str) -> bool:
    """Whether each partition is led by the replica that leads it after a preferred election."""
    partitions = admin.list_topics(topic, timeout=10).topics[topic].partitions.values()
    return all(each.leader == each.replicas[0] for each in partitions)


@pytest.mark.parametrize(("what", "suffix"), [("transactional id", "-0"), ("group", "-leader")])
def test_a_coordinator_moves(
    cluster: EmbeddedCluster, settings: Settings, tmp_path: Path, what: Coordinated, suffix: str
) -> None:
    """Of the transactions, or of the election: away by a kill, and back by a preferred election."""
    if what == "transactional id" and settings.delivery == "at-least-once":
        pytest.skip("at-least-once delivery has no transactions")
    topic = "__transaction_state" if what == "transactional id" else "__consumer_offsets"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    with load(cluster, settings, tmp_path) as running:
        eventually(lambda: elected(cluster, topic) and preferred_ones_lead(admin, topic), 30)
        first = cluster.coordinator(what, settings.group + suffix)
        first.kill()
        eventually(lambda: cluster.coordinator(what, settings.group + suffix) is not first, 30)
        running.flows()
        cluster.restart(first)
        running.flows()
        eventually(lambda: elected(cluster, topic) and cluster.coordinator(what, settings.group + suffix) is first, 30)
        running.flows()


def test_sigterm_while_a_broker_dies(cluster: EmbeddedCluster, settings: Settings, tmp_path: Path) -> None:
    """In the middle of transactions whose coordinator goes away: the harvester ends, and the other one goes on.

    At least once, it is the leader of a partition that goes away.
    """
    with load(cluster, settings, tmp_path, Mix(rows_per_second=2_000)) as running:
        leader = running.leader()
        node = cluster.leader(running.topic, 0)
        if settings.delivery == "exactly-once":
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
