"""One member of a group: it consumes in one of the compared ways, until SIGTERM, and writes down each record."""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click
from confluent_kafka import Consumer, KafkaException, Message

from outbox_plugin import coordination
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.settings import Settings

RECORD = struct.Struct("<HQdd")  # Partition, offset, when it was handed out, and when it was written.
HEARTBEAT_SECONDS = 3.0  # Coordination's: a member that is dead is given up after two.
SESSION_TIMEOUT_MS = 6_000  # A classic group's, to match. For KIP-848 the broker says: 45 s, if it is not told.
COMMIT_SECONDS = 0.5

Note = Callable[[int, int, float], None]
CLASSIC = {"session.timeout.ms": SESSION_TIMEOUT_MS, "heartbeat.interval.ms": 1_000}
GROUPS: dict[str, dict[str, str | int | float | bool]] = {
    "eager": {**CLASSIC, "partition.assignment.strategy": "range"},
    "cooperative": {**CLASSIC, "partition.assignment.strategy": "cooperative-sticky"},
    "cooperative, static": {**CLASSIC, "partition.assignment.strategy": "cooperative-sticky"},
    "KIP-848": {"group.protocol": "consumer"},
    "KIP-848, static": {"group.protocol": "consumer"},
}
KINDS = [*GROUPS, "coordination", "inbox"]


class Stopping:
    """Whether SIGTERM has come."""

    def __init__(self) -> None:
        self.now = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self.now = True


def consume_in_a_group(kind: str, bootstrap_servers: str, topic: str, client: str, note: Note) -> None:
    """As a member of a consumer group, which commits every half second."""
    config = {"bootstrap.servers": bootstrap_servers, "group.id": topic, "auto.offset.reset": "earliest"}
    if kind.endswith(", static"):
        config["group.instance.id"] = client
    stopping, committed_at = Stopping(), time.monotonic()
    with closing(Consumer(config | GROUPS[kind] | {"enable.auto.commit": False})) as consumer:
        consumer.subscribe([topic])
        while not stopping.now:
            if (message := consumer.poll(0.1)) is not None:
                if (error := message.error()) is None:
                    _note(message, note)
                elif error.fatal():
                    raise KafkaException(error)
            if time.monotonic() - committed_at > COMMIT_SECONDS and consumer.assignment():
                consumer.commit(asynchronous=True)
                committed_at = time.monotonic()


def consume_in_coordination(bootstrap_servers: str, topic: str, client: str, note: Note) -> None:
    """As an instance that claims partitions."""
    with coordination.Consumer(
        [topic],
        topic,
        client,
        heartbeat_interval_seconds=HEARTBEAT_SECONDS,
        coordination_topic=f"{topic}-claims",
        bootstrap_servers=bootstrap_servers,
    ) as consumer:
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        for message in consumer:
            _note(message, note)
            consumer.commit(message)


def consume_by_an_inbox(topic: str, note: Note) -> None:
    """As an inbox, whose settings come from the environment."""
    stopping = Stopping()

    def handle(_: object, event: Received) -> None:
        note(event.partition, event.offset, event.timestamp / 1000)

    with Inbox(Settings(), group=topic, topics=[topic], handler=handle):
        while not stopping.now:
            time.sleep(0.1)


def _note(message: Message, note: Note) -> None:
    note(message.partition() or 0, message.offset() or 0, message.timestamp()[1] / 1000)


@click.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("bootstrap_servers")
@click.argument("topic")
@click.argument("client")
def main(kind: str, bootstrap_servers: str, topic: str, client: str) -> None:
    """One member; it waits for its file's name, its imports done. Without one, it ends."""
    if not (out := sys.stdin.read()):
        return
    records = os.open(Path(out), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(partition: int, offset: int, written: float) -> None:
        os.write(records, RECORD.pack(partition, offset, time.time(), written))

    match kind:
        case "coordination":
            consume_in_coordination(bootstrap_servers, topic, client, note)
        case "inbox":
            consume_by_an_inbox(topic, note)
        case _:
            consume_in_a_group(kind, bootstrap_servers, topic, client, note)


if __name__ == "__main__":
    main()
