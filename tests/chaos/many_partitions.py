"""How long consumers without rebalances take to share very many partitions.

`python -m tests.chaos.many_partitions` starts a broker, and prints how long one consumer takes to claim all partitions
of a topic, and then how long a second one takes to have half of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import click
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from outbox_plugin.coordination import Consumer
from outbox_plugin.embedded.kafka import EmbeddedKafka
from tests.support import eventually

PARTITIONS_PER_REQUEST = 5_000  # A broker refuses a request that creates 10,000.
WAIT_SECONDS = 300.0
HEARTBEAT_SECONDS = 10.0


class Shared(NamedTuple):
    """Seconds since a consumer began to connect."""

    all_claimed: float  # By the first consumer, alone.
    half_claimed: float  # By the second one.


def share(bootstrap_servers: str, topic: str, partitions: int) -> Shared:
    """Let one consumer claim all partitions of a new topic, and a second one half of them.

    Args:
        bootstrap_servers: the brokers.
        topic: the topic to create.
        partitions: how many partitions it has.
    """
    _create(AdminClient({"bootstrap.servers": bootstrap_servers}), topic, partitions)
    with ExitStack() as consumers:
        first = consumers.enter_context(_Member(bootstrap_servers, topic, "first"))
        all_claimed = first.seconds_until(lambda: len(first.consumer.claims) == partitions)
        second = consumers.enter_context(_Member(bootstrap_servers, topic, "second"))
        half_claimed = second.seconds_until(lambda: len(second.consumer.claims) == partitions // 2)
        eventually(lambda: len(first.consumer.claims) == partitions - partitions // 2, WAIT_SECONDS)
        return Shared(all_claimed, half_claimed)


def _create(admin: AdminClient, topic: str, partitions: int) -> None:
    [made] = admin.create_topics([NewTopic(topic, num_partitions=min(partitions, PARTITIONS_PER_REQUEST))]).values()
    made.result(WAIT_SECONDS)
    for wanted in range(2 * PARTITIONS_PER_REQUEST, partitions + PARTITIONS_PER_REQUEST, PARTITIONS_PER_REQUEST):
        [widened] = admin.create_partitions([NewPartitions(topic, min(wanted, partitions))]).values()
        widened.result(WAIT_SECONDS)
    eventually(lambda: len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == partitions, WAIT_SECONDS)
    # The broker creates the logs of one topic after another, so the next topic is there when these are.
    [made] = admin.create_topics([NewTopic(f"{topic}-after", num_partitions=1)]).values()
    made.result(WAIT_SECONDS)
    eventually(lambda: f"{topic}-after" in admin.list_topics(timeout=30).topics, WAIT_SECONDS)


class _Member:
    """A consumer that a thread polls."""

    def __init__(self, bootstrap_servers: str, topic: str, client_id: str) -> None:
        self._began = time.monotonic()
        self.consumer = Consumer(
            [topic],
            f"{topic}-group",
            client_id,
            heartbeat_interval_seconds=HEARTBEAT_SECONDS,
            coordination_topic=f"{topic}-claims",
            bootstrap_servers=bootstrap_servers,
        )
        self._stop = Event()
        self._thread = Thread(target=self._poll, name=f"poll-{client_id}")

    def _poll(self) -> None:
        while not self._stop.is_set():
            self.consumer.poll(0.5)

    def seconds_until(self, reached: Callable[[], bool]) -> float:
        eventually(reached, WAIT_SECONDS)
        return time.monotonic() - self._began

    def __enter__(self) -> _Member:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.consumer.close()


@click.command()
@click.option("--partitions", default=10_000, show_default=True)
def main(partitions: int) -> None:
    """Print how long one consumer takes to claim all partitions of a topic, and a second one half of them."""
    with tempfile.TemporaryDirectory() as folder:
        kafka = EmbeddedKafka(Path(folder) / "kafka", click.echo)
        try:
            kafka.launch()
            kafka.wait()
            shared = share(kafka.bootstrap_servers, "many", partitions)
        finally:
            kafka.stop()
    click.echo(
        f"{partitions:,} partitions: the first consumer had all after {shared.all_claimed:.1f} s, "
        f"a second one had half after {shared.half_claimed:.1f} s"
    )


if __name__ == "__main__":
    main()
