"""A partition that takes no records while a broker is gone: its topic waits, all others flow, and nothing repeats.

Its only replica is on that broker; or one of two is, and its `min.insync.replicas` asks for both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from confluent_kafka import Consumer, TopicPartition

from outbox_plugin import Harvester, Settings
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.embedded.cluster import EmbeddedCluster
from outbox_plugin.relay.events import GenerationRaised, HarvestEvent, KeysHeld, TermFinished
from tests.cluster_topics import create_on
from tests.harvesting import (
    assert_exactly_once_in_order,
    assert_first_appearances_in_order,
    backlog,
    consume,
    create_topic,
    drained,
    insert_numbered,
)
from tests.support import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("leaderless")) as cluster:
        yield cluster


@pytest.fixture
def bootstrap_servers(cluster: EmbeddedCluster) -> str:
    return cluster.bootstrap_servers


class Arriving:
    """A `read_committed` consumer that counts the records of a topic with three partitions as they come."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": settings.bootstrap_servers,
                "group.id": f"{settings.group}-arriving",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
            }
        )
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(3)])
        self._counts = [0, 0, 0]

    def counts(self) -> list[int]:
        """How many have arrived, of each partition."""
        for message in self._consumer.consume(10_000, 0.2):
            if message.error() is None:
                self._counts[message.partition() or 0] += 1
        return list(self._counts)

    def close(self) -> None:
        self._consumer.close()


class Writing:
    """Writes to topics in turn, for as long as the body runs."""

    def __init__(self, settings: Settings, *topics: str) -> None:
        self._settings, self._topics = settings, topics
        self.written = 0  # Rows of each topic.

    @contextmanager
    def running(self) -> Iterator[None]:
        done = threading.Event()

        def write() -> None:
            while not done.wait(0.02):
                for topic in self._topics:
                    insert_numbered(self._settings, topic, self.written + 1, 20)
                self.written += 20

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            done.set()
            writer.join()


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("nodes", [[2], [0, 2]], ids=["no leader", "too few in sync"])
def test_other_topics_flow_while_a_partition_takes_nothing(
    cluster: EmbeddedCluster, settings: Settings, nodes: list[int], delivery: Delivery
) -> None:
    """The leader is busy when the broker dies, so that a transaction touches the partition and cannot end."""
    settings = settings.model_copy(update={"delivery": delivery})
    replicated, alone = create_topic(settings, f"{settings.group}-r"), create_on(cluster, f"{settings.group}-a", nodes)
    events: list[HarvestEvent] = []
    writing = Writing(settings, alone, replicated)
    with closing(Arriving(settings, replicated)) as arriving, Harvester(settings, observe=events.append):
        with writing.running():
            eventually(lambda: writing.written > 200 and backlog(settings) < 200, 60)
            cluster.nodes[-1].kill()
            eventually(lambda: any(isinstance(event, KeysHeld) for event in events), 60)
            seen = arriving.counts()
            eventually(lambda: all(now > then + 100 for now, then in zip(arriving.counts(), seen, strict=True)), 60)
        finished = [event for event in events if isinstance(event, TermFinished)]
        raised = [event for event in events if isinstance(event, GenerationRaised)]
        cluster.restart(cluster.nodes[-1])
        drained(settings)
    if delivery == "at-least-once":
        for topic in (alone, replicated):
            assert_first_appearances_in_order(consume(settings, topic), 1, writing.written)
        return
    assert finished == []
    print(f"went on under other ids: {raised}")  # None where no open transaction had touched the partition.
    for topic in (alone, replicated):
        assert_exactly_once_in_order(consume(settings, topic), 1, writing.written)
