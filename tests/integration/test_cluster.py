"""Three real brokers: replicated, one may be killed, and gone with their owner."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_plugin import Settings
from outbox_plugin.adapters import kafka_transactional_log, progress_reader
from outbox_plugin.adapters.broker_probe import all_brokers_answer
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_reader import bounds
from outbox_plugin.adapters.kafka_transactional_log import KafkaTransactionalLog
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.bench.proxy import DIRECTIONS, Direction, Proxy
from outbox_plugin.core.coordinator_partition import TRANSACTION_STATE_TOPIC, coordinator_partition
from outbox_plugin.core.progress import OutboxIdentity, ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Signer
from outbox_plugin.dagster.topic_end_offsets import topic_ends
from outbox_plugin.embedded.cluster import NODES, ClusterNode, EmbeddedCluster
from outbox_plugin.embedded.server import ServerFailed
from outbox_plugin.errors import LogUnavailable, TransactionStuck
from tests.cluster_topics import create_on
from tests.processes import runs
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

PROGRESS = ProgressRecord(OutboxIdentity("incarnation", "place"), "leader", 0, ())
COORDINATING_PARTITIONS = 4  # As the nodes' configuration has it: it must not change.
CLIENTS = 8  # Of which some take the same broker for the controller.


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster with a space")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def topic(cluster: EmbeddedCluster) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([NewTopic("replicated", num_partitions=NODES)])["replicated"].result(60)
    cluster.wait_in_sync()
    return "replicated"


def send(cluster: EmbeddedCluster, topic: str) -> None:
    """Send one record to each partition in one transaction, as the harvester does."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": "of-the-test"})
    producer.init_transactions(90)
    producer.begin_transaction()
    for partition in range(NODES):
        producer.produce(topic, b"value", partition=partition)
    producer.commit_transaction(90)
    producer.close()


def found(find: Callable[[], ClusterNode]) -> ClusterNode | None:
    """The node; None while nobody is in its place, as between two leaders."""
    with suppress(ServerFailed, KafkaException):
        return find()
    return None


def led_as_preferred(cluster: EmbeddedCluster, topic: str) -> list[ClusterNode | None]:
    """The leaders of the partitions, once they were given back to those that a busy machine had replaced."""
    with suppress(KafkaException):  # The one that is preferred may still be catching up.
        cluster.elect_preferred(topic)
    return [found(lambda each=each: cluster.leader(topic, each)) for each in range(NODES)]  # type: ignore[misc]


def test_topics_are_replicated_and_led_by_all(cluster: EmbeddedCluster, topic: str) -> None:
    send(cluster, topic)
    topics = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(timeout=30).topics
    for name in (topic, "__transaction_state"):
        assert {len(each.replicas) for each in topics[name].partitions.values()} == {NODES}
    eventually(lambda: {node and node.node for node in led_as_preferred(cluster, topic)} == {1, 2, 3}, 30)


def test_a_killed_node_is_replaced_and_comes_back(cluster: EmbeddedCluster, topic: str) -> None:
    first = cluster.leader(topic, 0)
    address = first.bootstrap_servers
    first.kill()
    eventually(lambda: found(lambda: cluster.leader(topic, 0)) not in (None, first), 30)
    send(cluster, topic)
    cluster.restart(first)
    assert first.bootstrap_servers == address
    eventually(lambda: led_as_preferred(cluster, topic)[0] is first, 30)


def test_coordinators_are_found_where_kafka_has_them(cluster: EmbeddedCluster, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})  # Its futures come to nothing without it.
    for number in range(4):
        group = f"group-{number}-of-the-test"
        with closing(Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": group})) as consumer:
            consumer.subscribe([topic])
            eventually(lambda: consumer.poll(0.1) is None and consumer.assignment(), 30)
            described = admin.describe_consumer_groups([group])[group].result(60)
            assert described.coordinator.id == cluster.coordinator("group", group).node


def test_the_coordinator_of_a_transactional_id_is_killed(cluster: EmbeddedCluster, topic: str) -> None:
    send(cluster, topic)
    before = cluster.coordinator("transactional id", "of-the-test")
    before.kill()
    eventually(lambda: found(lambda: cluster.coordinator("transactional id", "of-the-test")) not in (None, before), 30)
    send(cluster, topic)
    cluster.restart(before)


def test_clients_find_topics_ids_though_a_broker_has_died(cluster: EmbeddedCluster, topic: str) -> None:
    """A client that takes the dead broker for the controller must soon ask another one."""
    settings = Settings(dsn="postgresql://nowhere/none", bootstrap_servers=cluster.bootstrap_servers)
    with ExitStack() as opened, ThreadPoolExecutor(CLIENTS) as pool:
        clients = [opened.enter_context(closing(TopicIds(settings))) for _ in range(CLIENTS)]

        def all_find_it() -> bool:
            return all(topic in answer.known for answer in pool.map(lambda each: each.look_up([topic]), clients))

        eventually(all_find_it, 60)
        died = cluster.nodes[0]
        died.kill()
        try:
            eventually(lambda: found(lambda: cluster.leader(topic, 0)) not in (None, died), 30)
            eventually(all_find_it, 30)
        finally:
            cluster.restart(died)


@pytest.mark.parametrize(("replicas", "said"), [([2], "no broker leads"), ([0, 2], "1 replica(s) in sync")])
def test_a_progress_topic_that_takes_no_records_is_named(
    cluster: EmbeddedCluster, topic: str, monkeypatch: pytest.MonkeyPatch, replicas: list[int], said: str
) -> None:
    """A dead broker has replicas of other topics, too, and these are not to be blamed.

    The progress topic is also what keeps the next producer from its first transaction. It is not said to be gone.
    """
    monkeypatch.setattr(kafka_transactional_log, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(progress_reader, "bounds", partial(bounds, timeout_seconds=2.0))
    group = f"of-the-test-{len(replicas)}"
    settings = Settings(dsn="postgresql://nowhere/none", bootstrap_servers=cluster.bootstrap_servers, group=group)
    names, died = KafkaNames.of(settings), cluster.nodes[-1]
    create_on(cluster, names.progress_topic, replicas)
    signer = Signer(b"s" * 32)
    with closing(KafkaTransactionalLog(settings, names, Slice(0, 1), signer, lambda: True, lambda _: None)) as log:
        log.fence(0)
        assert log.publish([OutboxRow(1, 5, topic, "k", "v", [], [], 9)], PROGRESS)
        died.kill()
        try:
            with pytest.raises(LogUnavailable, match=f"the topic {names.progress_topic} takes no records: ") as told:
                log.publish([OutboxRow(2, 5, topic, "k", "v", [], [], 9)], PROGRESS)
            assert said in str(told.value)
            with pytest.raises(TransactionStuck, match=re.escape(said)):
                log.fence(0)
            if said == "no broker leads":
                with pytest.raises(LogUnavailable, match=said):
                    log.read_progress(fenced=True)
        finally:
            cluster.restart(died)


@pytest.mark.parametrize(("replicas", "said"), [([2], "no broker leads partition 0"), ([0, 2], "1 replica(s) in sync")])
def test_partitions_of_events_that_keep_another_harvesters_transaction_from_its_end_are_named(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, replicas: list[int], said: str
) -> None:
    """The next leader does not know which partitions they are: any that takes no records may be one of them."""
    monkeypatch.setattr(kafka_transactional_log, "STUCK_SECONDS", 1.0)
    group = f"of-the-test-events-{len(replicas)}"
    settings = Settings(dsn="postgresql://nowhere/none", bootstrap_servers=cluster.bootstrap_servers, group=group)
    names, died = KafkaNames.of(settings), cluster.nodes[-1]
    create_on(cluster, names.progress_topic, [0, 1])
    events = create_on(cluster, f"{group}-events", replicas)

    def new_log() -> KafkaTransactionalLog:
        return KafkaTransactionalLog(settings, names, Slice(0, 1), Signer(b"s" * 32), lambda: True, reserved)

    def reserved(topic: str) -> str | None:
        return None if topic == events else "of another test"

    row = OutboxRow(1, 5, events, "k", "v", [], [], 9)
    with closing(new_log()) as former, closing(new_log()) as next_log:
        former.fence(0)
        assert former.publish([row], PROGRESS)
        died.kill()
        try:
            assert not former.publish([row._replace(id=2)], PROGRESS)
            with pytest.raises(TransactionStuck, match=f"these lack that now: topic {events}: ") as told:
                next_log.fence(0)
            assert said in str(told.value)
        finally:
            cluster.restart(died)
        eventually(lambda: can_fence(next_log), 30)


def can_fence(log: KafkaTransactionalLog) -> bool:
    with suppress(LogUnavailable):
        log.fence(0)
        return True
    return False


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ([2], "no broker leads partition 0 now"),
        ([0, 2], "partition 0 has 1 replica(s) in sync, and its min.insync.replicas is 2"),
    ],
)
def test_a_topic_of_transactions_that_takes_no_records_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: list[int], said: str
) -> None:
    """No transaction can go on, and no takeover begin. The clients say no more than that nobody answers."""
    with EmbeddedCluster(tmp_path) as cluster:
        make_transaction_state(cluster, replicas)
        settings = coordinated_by(cluster, 0)
        names, died = KafkaNames.of(settings), cluster.nodes[-1]
        create_on(cluster, names.progress_topic, [0, 1])
        events = create_on(cluster, f"{settings.group}-events", [0, 1])
        message = re.escape(
            f"no broker coordinates the transactions of {settings.group}-0, because the topic {TRANSACTION_STATE_TOPIC}"
            f" takes no records: {said}"
        )
        leader, follower = (
            KafkaTransactionalLog(settings, names, Slice(0, 1), Signer(b"s" * 32), lambda: True, lambda _: None)
            for _ in range(2)
        )
        with closing(leader), closing(follower):
            leader.fence(0)
            assert leader.publish([OutboxRow(1, 5, events, "k", "v", [], [], 9)], PROGRESS)
            died.kill()
            with pytest.raises(LogUnavailable, match=message):
                leader.publish([OutboxRow(2, 5, events, "k", "v", [], [], 9)], PROGRESS)
            monkeypatch.setattr(kafka_transactional_log, "REQUEST_TIMEOUT_SECONDS", 2.0)
            with pytest.raises(LogUnavailable, match=message):
                follower.fence(0)
            monkeypatch.undo()
            cluster.restart(died)
            eventually(lambda: can_fence(follower), 60)


def make_transaction_state(cluster: EmbeddedCluster, replicas: list[int]) -> None:
    """Make Kafka's topic of transactions before Kafka does: partition 0 on these nodes, no other one on the last."""
    others = list(range(len(replicas)))
    placed = [replicas, *[others] * (COORDINATING_PARTITIONS - 1)]
    assignment = [[cluster.nodes[number].node for number in numbers] for numbers in placed]
    topic = NewTopic(
        TRANSACTION_STATE_TOPIC,
        num_partitions=COORDINATING_PARTITIONS,
        replica_assignment=assignment,
        config={"min.insync.replicas": str(len(replicas)), "cleanup.policy": "compact"},
    )
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([topic])[TRANSACTION_STATE_TOPIC].result(60)
    cluster.wait_in_sync()


def coordinated_by(cluster: EmbeddedCluster, partition: int) -> Settings:
    """Settings with a group whose shard's transactional id belongs to this partition of the topic of transactions."""
    for number in range(1_000):
        settings = Settings(
            dsn="postgresql://nowhere/none", bootstrap_servers=cluster.bootstrap_servers, group=f"group-{number}"
        )
        transactional_id = KafkaNames.of(settings).transactional_id(Slice(0, 1), 0)
        if coordinator_partition(transactional_id, COORDINATING_PARTITIONS) == partition:
            return settings
    raise AssertionError


def test_a_rolling_restart_keeps_it_writable(cluster: EmbeddedCluster, topic: str) -> None:
    pids = {node.pid for node in cluster.nodes}
    cluster.rolling_restart()
    assert not pids & {node.pid for node in cluster.nodes}
    send(cluster, topic)


@pytest.fixture(scope="module")
def proxies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Proxy]]:
    """Proxies in front of a cluster of their own, one for each node."""
    own = EmbeddedCluster(tmp_path_factory.mktemp("behind-proxies"))
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy()) for _ in own.nodes]
        for proxy, node in zip(proxies, own.nodes, strict=True):
            proxy.target = node.listen_behind(proxy.port)
        stack.enter_context(own)
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{proxies[0].port}"})
        eventually(lambda: len(admin.list_topics(timeout=30).brokers) == NODES, 30)
        yield proxies


def test_clients_of_a_proxy_are_sent_to_proxies_only(proxies: list[Proxy]) -> None:
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{proxies[0].port}"})
    brokers = admin.list_topics(timeout=30).brokers.values()
    assert {broker.port for broker in brokers} == {proxy.port for proxy in proxies}


@pytest.mark.parametrize("number", range(NODES))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_broker_that_accepts_and_does_not_answer_is_noticed(
    proxies: list[Proxy], number: int, direction: Direction
) -> None:
    servers = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
    settings = Settings(dsn="postgresql://nobody@127.0.0.1/nothing", bootstrap_servers=servers)
    eventually(lambda: all_brokers_answer(settings, "any"), 30)
    proxies[number].hold(direction)
    try:
        began = time.monotonic()
        assert not all_brokers_answer(settings, "any")
        assert time.monotonic() - began < 3.0 * PATIENCE
    finally:
        proxies[number].restore()
    eventually(lambda: all_brokers_answer(settings, "any"), 30)


def test_a_broker_that_is_silent_hides_the_ends_of_its_own_topics_alone(cluster: EmbeddedCluster) -> None:
    """librdkafka gives them offsets below 0, and no error, or another broker leads them by then."""
    cluster.wait_in_sync()
    first, *_, last = cluster.nodes
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    led_by = {
        f"led-by-{node.node}": [node.node, *(each.node for each in cluster.nodes if each is not node)]
        for node in (first, last)
    }
    new = [NewTopic(name, num_partitions=1, replica_assignment=[replicas]) for name, replicas in led_by.items()]
    for made in admin.create_topics(new).values():
        made.result(60)
    cluster.wait_in_sync()
    settings = Settings(dsn="postgresql://x", bootstrap_servers=last.bootstrap_servers)

    def ends() -> dict[str, int]:
        with suppress(LogUnavailable):
            return topic_ends(settings, list(led_by), time.monotonic() + 3.0)
        return {}

    eventually(lambda: ends() == dict.fromkeys(led_by, 0), 60)
    silent = psutil.Process(first.pid)
    silent.suspend()
    try:
        found = [ends() for _ in range(3)]
    finally:
        silent.resume()
    assert any(f"led-by-{last.node}" in each for each in found)
    assert all(end == 0 for each in found for end in each.values())
    cluster.wait_in_sync()


def test_nothing_is_left_behind(cluster: EmbeddedCluster) -> None:
    """The last test of the module: its cluster is stopped, twice."""
    servers = [psutil.Process(node.pid) for node in cluster.nodes]
    cluster.stop()
    assert not [each for each in servers if runs(each)]
    cluster.stop()
