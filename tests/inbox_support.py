"""Helpers for tests of the inbox: they produce records, and read the effects of handlers."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import psycopg
from confluent_kafka import Producer

from outbox_plugin.inbox import Received
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.pauses import Pauses
from outbox_plugin.inbox.poll_loop import PollLoop
from outbox_plugin.settings import Settings

NOWHERE = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1")
EFFECT = """
CREATE TABLE effect (
    number BIGSERIAL PRIMARY KEY, event TEXT NOT NULL, key TEXT, value TEXT, process INT DEFAULT 0
)
"""


def make_effect_table(settings: Settings) -> None:
    """The table that handlers write to."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(EFFECT)


def produce(
    settings: Settings,
    topic: str,
    events: Iterable[tuple[str | None, str | None]],
    *,
    identities: list[str] | None = None,
) -> list[str]:
    """Send (key, value) records, each with an idempotency key of its own, or with those given; returns them."""
    # Otherwise a record that is sent again could arrive behind later ones.
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "enable.idempotence": True})
    sent = []
    for number, (key, value) in enumerate(events):
        identity = identities[number] if identities else str(uuid.uuid4())
        headers: list[tuple[str, str | bytes | None]] = [("idempotency-key", identity)]
        producer.produce(topic, value, key, headers=headers)
        sent.append(identity)
    assert producer.flush(30) == 0
    producer.close()
    return sent


def record_effect(connection: psycopg.Connection[Any], event: Received) -> None:
    """A handler whose effect is a row."""
    value = None if event.value is None else event.value.decode()
    connection.execute(
        "INSERT INTO effect (event, key, value, process) VALUES (%s, %s, %s, pg_backend_pid())",
        (event.idempotency_key, event.key_text, value),
    )


def record_effects(connection: psycopg.Connection[Any], events: list[Received]) -> None:
    """A handler of batches whose effects are rows, written at once."""
    connection.execute(
        "INSERT INTO effect (event, key, value, process) SELECT *, pg_backend_pid() "
        "FROM unnest(%s::text[], %s::text[], %s::text[]) AS each (event, key, value)",
        (
            [event.idempotency_key for event in events],
            [event.key_text for event in events],
            [None if event.value is None else event.value.decode() for event in events],
        ),
    )


def effects(settings: Settings) -> list[tuple[str, str, str]]:
    """(idempotency key, key, value) of all effects, in the order in which they happened."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        return connection.execute("SELECT event, key, value FROM effect ORDER BY number").fetchall()


def values_by_key(settings: Settings) -> dict[str, list[str]]:
    """The values of each key's effects, in their order."""
    found: dict[str, list[str]] = {}
    for _, key, value in effects(settings):
        found.setdefault(key, []).append(value)
    return found


def query(settings: Settings, text: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement; its rows, if it has any."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        cursor = connection.execute(text.encode(), values)
        return cursor.fetchall() if cursor.description else []


def poll_loop(
    kafka: Any,
    positions: Any,
    topic_ids: Any,
    *,
    keep: timedelta = timedelta(days=7),
    dispatcher: Dispatcher | None = None,
) -> Any:
    """The loop of an inbox, with stand-ins for Kafka's client, for the positions in Postgres and for topics' ids."""
    dispatcher = dispatcher or Dispatcher(4, None)
    pauses, stop = Pauses(dispatcher), threading.Event()
    return PollLoop(NOWHERE, "billing", kafka, dispatcher, pauses, positions, topic_ids, keep.total_seconds(), stop)
