"""Consumers that share a topic through a real broker alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_plugin.coordination import Consumer
from outbox_plugin.coordination.events import ClaimEvent, ClaimLost
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import OutboxError
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

INTERVAL = 4.0
PARTITIONS = 6


@pytest.fixture
def orders(bootstrap_servers: str, group: str) -> str:
    """An empty topic with six partitions."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    [made] = admin.create_topics([NewTopic(f"{group}-orders", num_partitions=PARTITIONS)]).values()
    made.result(60)
    eventually(lambda: f"{group}-orders" in admin.list_topics(timeout=30).topics, 20)
    return f"{group}-orders"


@pytest.fixture
def write(bootstrap_servers: str, orders: str) -> Iterator[Callable[[range], None]]:
    """Writes numbers to the topic, spread over its partitions, in order within each."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True})

    def numbers(wanted: range) -> None:
        for number in wanted:
            producer.produce(orders, str(number), partition=number % PARTITIONS)
        assert producer.flush(20) == 0

    yield numbers
    producer.close()


class Running:
    """A consumer that is iterated on a thread of its own."""

    def __init__(self, consumer: Consumer, *, commit: bool = True, pause_seconds: float = 0) -> None:
        self.consumer = consumer
        self.seen: list[tuple[int, int, int]] = []  # Partition, offset, number.
        self.trouble: OutboxError | None = None
        self._commit = commit
        self._pause_seconds = pause_seconds
        self._thread = threading.Thread(target=self._run, name=f"outbox-test-{consumer.instance_id}")
        self._thread.start()

    def _run(self) -> None:
        try:
            for message in self.consumer:
                self.seen.append(_seen(message))
                time.sleep(self._pause_seconds)  # How long it takes to handle one.
                if self._commit:
                    self.consumer.commit(message)
        except OutboxError as error:
            self.trouble = error

    @property
    def numbers(self) -> list[int]:
        return [number for _, _, number in self.seen]

    def end(self, *, release: bool = True) -> None:
        self.consumer.stop()
        self._thread.join(90)
        self.consumer.close(release=release)


def _seen(message: Message) -> tuple[int, int, int]:
    return message.partition() or 0, message.offset() or 0, int(message.value() or -1)


@pytest.fixture
def start(bootstrap_servers: str, orders: str, group: str) -> Iterator[Callable[..., Running]]:
    """Starts consumers of the topic; all that is left is ended."""
    with ExitStack() as ends:

        def consumer(client_id: str, *, commit: bool = True, pause_seconds: float = 0, **options: Any) -> Running:
            given = {"heartbeat_interval_seconds": INTERVAL, "coordination_topic": f"{group}-claims", **options}
            running = Running(
                Consumer([orders], group, client_id, bootstrap_servers=bootstrap_servers, **given),
                commit=commit,
                pause_seconds=pause_seconds,
            )
            ends.callback(running.end)
            return running

        yield consumer


def held(*running: Running) -> list[int]:
    """How many partitions each holds."""
    return [len(each.consumer.claims) for each in running]


def forget_the_log(cluster: AdminClient, topic: str) -> None:
    """As Kafka does it after a day: the topic's records are deleted."""
    partitions = range(len(cluster.list_topics(topic, timeout=10).topics[topic].partitions))
    for deleted in cluster.delete_records([KafkaTopicPartition(topic, each, -1) for each in partitions]).values():
        deleted.result(60)


def test_all_is_consumed_in_order_and_goes_on_where_it_was_released(
    start: Callable[..., Running], write: Callable[[range], None]
) -> None:
    write(range(600))
    first = start("one")
    eventually(lambda: len(first.seen) == 600, 20)
    for partition in range(PARTITIONS):
        assert [number for at, _, number in first.seen if at == partition] == list(range(partition, 600, PARTITIONS))
    first.end()
    write(range(600, 900))
    second = start("two")
    eventually(lambda: len(second.seen) >= 300, 20)
    assert sorted(second.numbers) == list(range(600, 900))


def test_an_observer_that_fails_ends_no_consumer(start: Callable[..., Running], write: Callable[[range], None]) -> None:
    claimed: list[ClaimEvent] = []

    def observe(event: ClaimEvent) -> None:
        claimed.append(event)
        raise ValueError("mine")

    write(range(60))
    only = start("one", observe=observe)
    eventually(lambda: len(only.seen) == 60, 20)
    only.end()
    assert only.trouble is None
    assert len(claimed) == 2 * PARTITIONS  # Each was gained, and lost at the end.


def test_what_is_not_committed_comes_again(start: Callable[..., Running], write: Callable[[range], None]) -> None:
    write(range(60))
    first = start("one", commit=False)
    eventually(lambda: len(first.seen) == 60, 20)
    first.end()
    second = start("two")
    eventually(lambda: len(second.seen) >= 60, 20)
    assert sorted(second.numbers) == list(range(60))


def test_at_most_once_nothing_comes_again(start: Callable[..., Running], write: Callable[[range], None]) -> None:
    write(range(60))
    first = start("one", guarantee="at-most-once", commit=False)
    eventually(lambda: len(first.seen) == 60, 20)
    first.end()
    write(range(60, 120))
    second = start("two", guarantee="at-most-once")
    eventually(lambda: len(second.seen) >= 60, 20)
    assert sorted(second.numbers) == list(range(60, 120))


def test_a_race_for_claims_is_decided_by_the_log(start: Callable[..., Running], write: Callable[[range], None]) -> None:
    """Three start at once: each partition is gained once, until all have their share, and none is disturbed then."""
    running: list[Running] = []
    threads = [threading.Thread(target=lambda n=n: running.append(start(f"client-{n}"))) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    eventually(lambda: held(*running) == [2, 2, 2], 20)
    write(range(600))
    eventually(lambda: sum(len(each.seen) for each in running) >= 600, 20)
    assert sorted(number for each in running for number in each.numbers) == list(range(600))
    claimed = [tp for each in running for tp in each.consumer.claims]
    assert len(set(claimed)) == PARTITIONS


def test_who_comes_later_gets_a_share_without_a_stop(
    start: Callable[..., Running], write: Callable[[range], None]
) -> None:
    lost: list[Any] = []
    first = start("one", observe=lost.append)
    eventually(lambda: held(first) == [6], 20)
    lost.clear()
    second = start("two")
    eventually(lambda: held(first, second) == [3, 3], 20)
    assert len(lost) == 3, "only what moves is disturbed"


def test_a_restart_goes_on_with_its_claims_at_once(
    start: Callable[..., Running], write: Callable[[range], None]
) -> None:
    """The first run dies: nothing is released, and nobody takes its claims, as it has hardly gone."""
    write(range(600))
    interval = 4 * INTERVAL
    others = start("other", heartbeat_interval_seconds=interval)
    first = start("one", heartbeat_interval_seconds=interval)
    eventually(lambda: held(others, first) == [3, 3], 40)
    claims = set(first.consumer.claims)
    first.end(release=False)
    began = time.monotonic()
    again = start("one", heartbeat_interval_seconds=interval)
    eventually(lambda: set(again.consumer.claims) == claims, 40)
    assert time.monotonic() - began < interval, "it waited for nobody's heartbeat"
    assert held(others) == [3]


def test_a_claim_that_falls_behind_is_left_to_others(
    start: Callable[..., Running], write: Callable[[range], None], bootstrap_servers: str, orders: str, group: str
) -> None:
    """It handles one a second, and ever more wait."""
    behind: list[TopicPartition] = []

    def observe(event: ClaimEvent) -> None:
        if isinstance(event, ClaimLost) and event.why.startswith("it fell behind"):
            behind.append(event.topic_partition)

    slow = start("slow", observe=observe, pause_seconds=1)
    fast = start("fast")
    eventually(lambda: held(slow, fast) == [3, 3], 20)
    wrote = 0
    deadline = time.monotonic() + 90 * PATIENCE
    while not behind and time.monotonic() < deadline:
        write(range(wrote, wrote + 60))
        wrote += 60
        time.sleep(0.2)
    eventually(lambda: any(tp in fast.consumer.claims for tp in behind), 60)


def test_limits_are_kept(start: Callable[..., Running], write: Callable[[range], None]) -> None:
    one, two = start("one", max_claims=1), start("two")
    eventually(lambda: held(one, two) == [1, 5], 30)


def test_one_that_does_not_poll_holds_nothing(
    start: Callable[..., Running], bootstrap_servers: str, orders: str, group: str
) -> None:
    with Consumer(
        [orders],
        group,
        "idle",
        bootstrap_servers=bootstrap_servers,
        coordination_topic=f"{group}-claims",
        heartbeat_interval_seconds=INTERVAL,
        idle_seconds=1,
    ) as idle:
        eventually(lambda: not idle.poll(0.05) and len(idle.claims) == PARTITIONS, 20)
        eventually(lambda: not idle.claims, 20)
        other = start("other")
        eventually(lambda: held(other) == [PARTITIONS], 20)


def test_what_is_malformed_on_the_topic_is_counted_and_skipped(
    start: Callable[..., Running], write: Callable[[range], None], bootstrap_servers: str, group: str
) -> None:
    first = start("one")
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    for body in (b"", b"banana", b"\xff/1", b"Heartbeat/1/2/i/c/g/t/x/4"):
        for partition in range(8):
            producer.produce(f"{group}-claims", body, partition=partition)
    assert producer.flush(20) == 0
    producer.close()
    eventually(lambda: first.consumer.malformed == 4, 20)
    write(range(60))
    eventually(lambda: len(first.seen) == 60, 20)
