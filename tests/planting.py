"""Topics with records as a Spark job's events have them, in the order and with the faults that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psycopg
from confluent_kafka import Producer

from outbox_plugin import Settings

EVENTS, KEYS = 600, 20


class Planted(NamedTuple):
    """A record as a test writes it; its place is its number, and names it."""

    place: int
    named: bool = True
    aborted: bool = False


ALL = [Planted(place) for place in range(1, EVENTS + 1)]


def plant(settings: Settings, topic: str, records: Sequence[Planted], job: str = "j") -> None:
    """Each in a transaction of the aborted, or of the committed, in the order given."""
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
                producer.produce(topic, b"v", f"key-{record.place % KEYS}", headers=[*named, *headers])
        (producer.abort_transaction if aborted else producer.commit_transaction)(30)
    producer.close()
