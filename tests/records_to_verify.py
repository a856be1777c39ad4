"""Writes records to verify: like those of a Spark job's events, in any order and with faults."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition

from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_clients import client_config
from outbox_plugin.adapters.kafka_reader import bounds
from tests.support import eventually

EVENTS, KEYS = 600, 20


class Planted(NamedTuple):
    """A record that a test writes. `place` is its number in the job, and gives it its name."""

    place: int
    named: bool = True
    aborted: bool = False
    replayed: bool = False


ALL = [Planted(place) for place in range(1, EVENTS + 1)]


def plant(settings: Settings, topic: str, records: Sequence[Planted], job: str = "j") -> None:
    """Write records in order: first an aborted transaction, then a committed one. Waits until all can be read."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("INSERT INTO outbox_job (job_id, events) VALUES (%s, %s)", (job, EVENTS))
    config = {"bootstrap.servers": settings.bootstrap_servers, "transactional.id": f"{settings.group}-plant"}
    producer = Producer(dict(config))
    producer.init_transactions(30)
    for aborted in (True, False):
        producer.begin_transaction()
        for record in records:
            if record.aborted is aborted:
                headers = [("outbox-job", job.encode()), ("outbox-sequence", str(record.place).encode())]
                named = [("idempotency-key", f"event-{record.place}".encode())] if record.named else []
                again = [("outbox-replay", b"17")] if record.replayed else []
                producer.produce(topic, b"v", f"key-{record.place % KEYS}", headers=[*named, *headers, *again])
        (producer.abort_transaction if aborted else producer.commit_transaction)(30)
    producer.close()
    # A commit is answered before each partition shows it.
    eventually(lambda: _ends(settings, topic, "read_committed") == _ends(settings, topic, "read_uncommitted"), 30)


def plant_moved_key(settings: Settings, topic: str) -> None:
    """Records of one key, in two partitions: one record is out of order within its own."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for partition, place in ((1, 1), (0, 5), (0, 4), (1, 3)):
        headers: list[tuple[str, str | bytes | None]] = [("outbox-job", "moved"), ("outbox-sequence", str(place))]
        producer.produce(topic, b"v", b"key", partition, headers=headers)
        if producer.flush(30):
            raise TimeoutError("Kafka took no record")


def _ends(settings: Settings, topic: str, isolation: str) -> list[int]:
    """How far each partition can be read."""
    config = client_config(settings, group_id=f"{settings.group}-plant", isolation_level=isolation)
    with closing(Consumer(config)) as consumer:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        return [bounds(consumer, TopicPartition(topic, each))[1] for each in partitions]
