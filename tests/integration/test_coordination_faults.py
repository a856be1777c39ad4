"""What befalls consumers that share topics: held interpreters, and topics that change under them."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from outbox_plugin.coordination import Admin, Consumer, Heartbeat
from outbox_plugin.coordination.actions import KeepPosition
from outbox_plugin.coordination.log import CoordinationLog
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.errors import OutboxError, UserError
from outbox_plugin.kafka_settings import kafka_settings
from tests.integration.test_coordination import (
    INTERVAL,
    PARTITIONS,
    Running,
    forget_the_log,
    held,
    orders,
    start,
    write,
)
from tests.processes import paused
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration
__all__ = ["orders", "start", "write"]  # Fixtures.


@pytest.fixture
def cluster(bootstrap_servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap_servers})


@pytest.fixture
def admin(bootstrap_servers: str, group: str) -> Admin:
    return Admin(
        bootstrap_servers=bootstrap_servers, coordination_topic=f"{group}-claims", heartbeat_interval_seconds=INTERVAL
    )


def make(cluster: AdminClient, topic: str, partitions: int, **config: str) -> None:
    wanted = NewTopic(topic, num_partitions=partitions, config={k.replace("_", "."): v for k, v in config.items()})
    [made] = cluster.create_topics([wanted]).values()
    made.result(60)
    eventually(lambda: topic in cluster.list_topics(timeout=30).topics, 20)


def delete(cluster: AdminClient, topic: str) -> None:
    [deleted] = cluster.delete_topics([topic]).values()
    deleted.result(60)
    eventually(lambda: topic not in cluster.list_topics(timeout=30).topics, 20)


def hold_the_interpreter(seconds: float) -> None:
    """As an extension does that computes without letting others run: nothing else happens in this process."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_nothing_is_lost_by_handlers_that_hold_the_interpreter(
    bootstrap_servers: str, orders: str, group: str, write: Callable[[range], None]
) -> None:
    """Now and then for most of what a heartbeat may take: the claim looks old, and is ours all the same."""
    write(range(240))
    seen: set[int] = set()
    with Consumer(
        [orders],
        group,
        "one",
        bootstrap_servers=bootstrap_servers,
        coordination_topic=f"{group}-claims",
        heartbeat_interval_seconds=1,
    ) as consumer:
        deadline = time.monotonic() + 90 * PATIENCE
        while len(seen) < 240 and time.monotonic() < deadline:
            message = consumer.poll(1)
            if message is None:
                continue
            seen.add(int(message.value() or -1))
            if len(seen) % 20 == 0:
                hold_the_interpreter(2.2)
            consumer.commit(message)
    assert sorted(seen) == list(range(240))


def test_a_topic_that_was_recreated_is_consumed_from_its_beginning(
    start: Callable[..., Running], write: Callable[[range], None], cluster: AdminClient, orders: str
) -> None:
    write(range(60))
    first = start("one")
    eventually(lambda: len(first.seen) == 60, 30)
    first.end()
    delete(cluster, orders)
    make(cluster, orders, PARTITIONS)
    write(range(60, 120))
    second = start("two")
    eventually(lambda: sorted(second.numbers) == list(range(60, 120)), 30)


def test_a_position_that_was_set_before_a_topic_was_recreated_is_none_in_the_new_one(
    start: Callable[..., Running],
    write: Callable[[range], None],
    cluster: AdminClient,
    admin: Admin,
    orders: str,
    group: str,
) -> None:
    """Neither for a group that has never begun, nor does one lose what is set in the new topic while it is down."""
    write(range(60))
    admin.pause(group)
    admin.set_position(group, {(orders, partition): 5 for partition in range(PARTITIONS)})
    delete(cluster, orders)
    make(cluster, orders, PARTITIONS)
    write(range(60, 120))
    admin.set_position(group, {(orders, 0): 5})
    admin.resume(group)
    first = start("one")
    total = 60 - 5
    eventually(lambda: len(first.seen) >= total, 30)
    assert [min(at for partition, at, _ in first.seen if partition == each) for each in range(PARTITIONS)] == [
        5,
        *[0] * (PARTITIONS - 1),
    ]


def test_a_topic_that_is_recreated_under_its_consumer_is_consumed_from_its_beginning(
    start: Callable[..., Running], write: Callable[[range], None], cluster: AdminClient, orders: str
) -> None:
    write(range(60))
    first = start("one")
    eventually(lambda: len(first.seen) == 60, 30)
    delete(cluster, orders)
    make(cluster, orders, PARTITIONS)
    write(range(60, 180))
    eventually(lambda: set(first.numbers) == set(range(180)), 60)


def test_a_pause_and_a_position_outlive_what_kafka_forgets(
    start: Callable[..., Running],
    write: Callable[[range], None],
    cluster: AdminClient,
    admin: Admin,
    orders: str,
    group: str,
) -> None:
    """Kafka forgets a group that nobody joins after some days, and the log after one."""
    write(range(60))
    first = start("one")
    eventually(lambda: len(first.seen) == 60, 30)
    admin.pause(group)
    admin.set_position(group, {(orders, 0): 7})
    first.end()
    [forgotten] = cluster.delete_consumer_groups([group]).values()
    forgotten.result(60)
    forget_the_log(cluster, f"{group}-claims")
    second = start("two")
    time.sleep(2 * INTERVAL)  # That nothing happens can only be waited for.
    assert second.seen == []
    assert group in admin.world().pauses
    admin.resume(group)
    eventually(lambda: second.seen and len(second.seen) >= 3, 30)
    time.sleep(1)
    assert sorted(second.seen) == [(0, offset, offset * PARTITIONS) for offset in (7, 8, 9)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}, "cleanup.policy=compact"),
        ({"message.timestamp.type": "CreateTime"}, "message.timestamp.type=CreateTime; expected LogAppendTime"),
        ({"message.timestamp.type": "LogAppendTime", "retention.ms": "60000"}, "retention.ms=60000"),
    ],
)
def test_a_coordination_topic_of_a_wrong_form_is_refused(
    cluster: AdminClient, bootstrap_servers: str, orders: str, group: str, wrong: dict[str, str], said: str
) -> None:
    make(cluster, f"{group}-claims", 8, **wrong)
    with pytest.raises(UserError, match=said) as caught:
        Consumer([orders], group, "one", bootstrap_servers=bootstrap_servers, coordination_topic=f"{group}-claims")
    assert "\n" not in str(caught.value)


def test_a_coordination_topic_that_becomes_compacted_is_noticed(
    start: Callable[..., Running], cluster: AdminClient, group: str
) -> None:
    first = start("one")
    eventually(lambda: held(first) == [PARTITIONS], 30)
    policy = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, f"{group}-claims", incremental_configs=[policy])
    [altered] = cluster.incremental_alter_configs([resource]).values()
    altered.result(60)
    eventually(lambda: first.trouble is not None, 30)
    assert "cleanup.policy" in str(first.trouble)


def test_a_coordination_topic_that_is_deleted_is_noticed(
    start: Callable[..., Running], cluster: AdminClient, group: str
) -> None:
    first = start("one")
    eventually(lambda: held(first) == [PARTITIONS], 30)
    delete(cluster, f"{group}-claims")
    eventually(lambda: first.trouble is not None, 30)
    assert isinstance(first.trouble, OutboxError)
    assert "was deleted or recreated" in str(first.trouble)


def test_a_coordination_topic_that_is_widened_has_no_second_holder(
    start: Callable[..., Running], write: Callable[[range], None], cluster: AdminClient, orders: str, group: str
) -> None:
    """All go on with the partitions that it had first, wherever one looks for a topic among more of them."""
    first = start("one", guarantee="at-most-once")
    eventually(lambda: held(first) == [PARTITIONS], 30)
    [widened] = cluster.create_partitions([NewPartitions(f"{group}-claims", 31)]).values()
    widened.result(60)
    eventually(lambda: len(cluster.list_topics(timeout=30).topics[f"{group}-claims"].partitions) == 31, 20)
    second = start("two", guarantee="at-most-once")
    write(range(240))
    eventually(lambda: len(first.seen) + len(second.seen) >= 240 and held(first, second) == [3, 3], 30)
    assert sorted(first.numbers + second.numbers) == list(range(240))


@pytest.fixture
def writing(bootstrap_servers: str, orders: str) -> Iterator[Callable[[], None]]:
    """Leaves a transaction open on partition 0 of the topic, with records after it."""
    producers = []

    def open_one() -> None:
        producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": f"{orders}-open"})
        producers.append(producer)
        producer.init_transactions(20)
        producer.begin_transaction()
        producer.produce(orders, "0", partition=0)
        producer.flush(20)

    yield open_one
    for producer in producers:
        producer.abort_transaction(20)


def test_an_open_transaction_and_a_burst_are_nobodys_slowness(
    start: Callable[..., Running], write: Callable[[range], None], writing: Callable[[], None]
) -> None:
    events: list[object] = []
    one = start("one", heartbeat_interval_seconds=1, observe=events.append)
    two = start("two", heartbeat_interval_seconds=1, observe=events.append)
    eventually(lambda: held(one, two) == [3, 3], 30)
    events.clear()
    writing()
    wrote = 0
    deadline = time.monotonic() + 15  # Many heartbeats; the end goes on, and what is readable does not.
    while time.monotonic() < deadline:
        write(range(wrote, wrote + 60))
        wrote += 60
        time.sleep(0.3)
    assert [event for event in events if "fell behind" in str(event)] == []


def test_many_partitions_are_held_soon(bootstrap_servers: str, group: str, cluster: AdminClient) -> None:
    topic = f"{group}-wide"
    make(cluster, topic, 1_000)
    began = time.monotonic()
    with closing(
        Consumer(
            [topic],
            group,
            "one",
            bootstrap_servers=bootstrap_servers,
            coordination_topic=f"{group}-claims",
        )
    ) as consumer:
        stop = threading.Event()
        poller = threading.Thread(target=lambda: [consumer.poll(0.1) for _ in iter(stop.is_set, True)])
        poller.start()
        try:
            eventually(lambda: len(consumer.claims) == 1_000, 30)
            print(f"1,000 partitions were held after {time.monotonic() - began:.1f} s")
        finally:
            stop.set()
            poller.join(90)


def test_a_log_whose_topics_it_has_made_is_gone_with_the_last_reference_to_it(
    bootstrap_servers: str, group: str
) -> None:
    """Not with the next collection of cycles, which may run on a thread of the log's own client."""
    gc.collect()
    gc.disable()
    try:
        log = CoordinationLog(kafka_settings(bootstrap_servers, None), f"{group}-claims", group)
        gone = weakref.ref(log)
        log.close()
        del log
        assert gone() is None
    finally:
        gc.enable()


def test_a_log_is_closed_soon_though_kafka_does_not_answer(group: str, kafka: EmbeddedKafka) -> None:
    """librdkafka would wait for the answer to a commit, for a minute or more."""
    log = CoordinationLog(kafka_settings(kafka.bootstrap_servers, None), f"{group}-claims", group)
    with paused(kafka.pid):
        log.keep([KeepPosition(TopicPartition("orders", 0), 10, ("topic",), log.log_time())])
        closing_log = threading.Thread(target=log.close, daemon=True)
        closing_log.start()
        closing_log.join(10 * PATIENCE)
        assert not closing_log.is_alive()
    eventually(lambda: "outbox-consumer-close" not in [each.name for each in threading.enumerate()], 60)


def test_positions_are_kept_and_committed_while_another_thread_reads(
    bootstrap_servers: str, orders: str, group: str
) -> None:
    """At most once, each batch waits for that: no record is handed out before its position is kept."""
    log = CoordinationLog(kafka_settings(bootstrap_servers, None), f"{group}-claims", group)
    with closing(log):
        tp = TopicPartition(orders, 0)
        assert list(log.follow([0], log.log_time())) == []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                log.read(0.05)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            kept: list[bool] = []
            keeper = threading.Thread(
                target=lambda: kept.append(log.keep([KeepPosition(tp, 10, ("topic",), log.log_time())], wait=True)),
                daemon=True,
            )
            keeper.start()
            keeper.join(10 * PATIENCE)
            assert kept == [True]
        finally:
            done.set()
            reader.join()
        log.read(0)
        eventually(lambda: log.committed([tp]) == {tp: 10}, 10)


@pytest.mark.parametrize("ends", ["by a refusal", "by itself"])
def test_what_is_kept_is_committed_when_the_reading_ends(
    bootstrap_servers: str, orders: str, group: str, ends: str
) -> None:
    """A commit at the close, which may be much later, would put the group back behind what others have consumed."""
    log = CoordinationLog(kafka_settings(bootstrap_servers, None), f"{group}-claims", group)
    with closing(log), closing(KafkaConsumer({"bootstrap.servers": bootstrap_servers, "group.id": group})) as other:
        tp = TopicPartition(orders, 0)
        assert list(log.follow([0], log.log_time())) == []
        assert log.keep([KeepPosition(tp, 10, ("topic",), log.log_time())], wait=True)
        if ends == "by a refusal":
            log._trouble = UserError("refused")
            with pytest.raises(UserError, match="refused"):
                log.read(0)
        else:
            log.flush()
        eventually(lambda: [each.offset for each in other.committed([KafkaTopicPartition(*tp)], 10)] == [10], 10)


def test_as_much_is_read_at_once_as_one_sends_who_holds_very_many_partitions(
    bootstrap_servers: str, group: str
) -> None:
    """Who reads less between two heartbeats than it sends falls behind what it says, until all its claims are stale."""
    sent = 10_000
    log = CoordinationLog(kafka_settings(bootstrap_servers, None), f"{group}-claims", group)
    with closing(log):
        assert list(log.follow([0], log.log_time())) == []

        def are_read_at_once() -> bool:
            for number in range(sent):
                log.send(Heartbeat(0, 0, "run-1", "one", group, "orders", number, 0), 0)
            log.flush()
            most = 0
            while found := len(log.read(1.0)):
                most = max(most, found)
                time.sleep(0.5)  # More arrives meanwhile than is asked for at once.
            return most > sent / 2 + 1

        eventually(are_read_at_once, 30)


def test_kafkas_own_store_knows_what_is_done(
    start: Callable[..., Running], write: Callable[[range], None], bootstrap_servers: str, orders: str, group: str
) -> None:
    """For tools that look there; nothing of ours rests on it."""
    from confluent_kafka import TopicPartition as KafkaTopicPartition

    write(range(60))
    first = start("one")
    eventually(lambda: len(first.seen) == 60, 30)
    first.end()
    with closing(KafkaConsumer({"bootstrap.servers": bootstrap_servers, "group.id": group})) as tool:
        wanted = [KafkaTopicPartition(orders, each) for each in range(PARTITIONS)]
        eventually(lambda: [each.offset for each in tool.committed(wanted, 10)] == [10] * PARTITIONS, 20)


def test_the_offsets_of_very_many_partitions_are_committed(
    bootstrap_servers: str, group: str, cluster: AdminClient
) -> None:
    """A broker refuses a commit of more than 1 MiB. With names this long, that is one of 60 partitions."""
    topic, named_at_length = f"{group}-wide", f"{group}-{'g' * 20_000}"
    make(cluster, topic, 60)
    wanted = {TopicPartition(topic, each): each + 1 for each in range(60)}
    with closing(CoordinationLog(kafka_settings(bootstrap_servers, None), f"{group}-claims", named_at_length)) as log:
        assert list(log.follow([0], log.log_time())) == []
        assert log.keep([KeepPosition(tp, at, ("topic",), log.log_time()) for tp, at in wanted.items()], wait=True)
        log.read(0)
        eventually(lambda: log.committed([*wanted]) == wanted, 10)
