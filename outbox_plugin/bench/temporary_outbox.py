"""Helpers of the benchmarks: a temporary outbox on the user's servers, rows for it, and the form of reports."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol

import psycopg
from confluent_kafka.admin import AdminClient, NewTopic
from psycopg import sql

from outbox_plugin.adapters.kafka_clients import client_config
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings

VALUE_BYTES = 200
PATIENCE_SECONDS = 600.0
_ANSWER_SECONDS = 20.0
Tell = Callable[[str], None]


class Report(Protocol):
    """The report of a benchmark."""

    def lines(self) -> list[str]:
        """The report as lines of text; the last one is the most important."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        ...


def median_ratio(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Of what was measured in turn: ours over the reference, the median of the pairs; 0 where nothing was measured."""
    return median(each / other for each, other in zip(ours, reference, strict=True)) if ours else 0.0


def table_of(settings: Settings) -> sql.Identifier:
    """The outbox table as an SQL identifier."""
    return sql.Identifier(*settings.table.split("."))


def connect(settings: Settings, *, autocommit: bool = False) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection as a writer would have it."""
    return psycopg.connect(settings.dsn.get_secret_value(), autocommit=autocommit)


def insert(connection: psycopg.Connection[Any], settings: Settings, topic: str, rows: int, keys: int) -> None:
    """Insert rows of about 200 bytes with one header each, in one statement.

    Args:
        connection: the caller commits on it.
        settings: of the outbox.
        topic: of the rows.
        rows: how many rows are inserted.
        keys: how many keys the rows have.
    """
    connection.execute(
        sql.SQL(
            "INSERT INTO {} (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
            "SELECT %s, 'key-' || i %% %s, repeat('x', %s), ARRAY['idempotency-key'], ARRAY[i::text] "
            "FROM generate_series(1, %s) AS i"
        ).format(table_of(settings)),
        (topic, keys, VALUE_BYTES, rows),
    )


def create_topic(settings: Settings, topic: str, partitions: int) -> None:
    """Create a topic with the broker's own number of replicas.

    Args:
        settings: how to reach Kafka.
        topic: its name.
        partitions: how many it has.

    Raises:
        KafkaException: the broker refused.
        LogUnavailable: no broker answered in time.
    """
    admin = AdminClient(client_config(settings))
    [future] = admin.create_topics([NewTopic(topic, num_partitions=partitions)]).values()
    try:
        future.result(_ANSWER_SECONDS)
    except TimeoutError:
        raise LogUnavailable(f"Kafka: the topic {topic} was not made within {_ANSWER_SECONDS:.0f} s") from None


def vacuum(settings: Settings) -> None:
    """Remove the dead rows of a round, so that the next one does not pay for them."""
    with connect(settings, autocommit=True) as connection:
        connection.execute(sql.SQL("VACUUM ANALYZE {}").format(table_of(settings)))


@contextmanager
def temporary_outbox(settings: Settings) -> Iterator[Settings]:
    """Settings with a temporary schema and group."""
    with temporary_outboxes(settings, 1) as [scratch]:
        yield scratch


@contextmanager
def temporary_outboxes(settings: Settings, count: int) -> Iterator[list[Settings]]:
    """Settings of `count` outboxes, each with a temporary schema and group of its own."""
    prefix = f"outbox_bench_{uuid.uuid4().hex[:8]}"
    names = [f"{prefix}_{number}" for number in range(count)]
    scratch = [settings.model_copy(update={"table": f"{name}.outbox", "group": name}) for name in names]
    try:
        with connect(settings, autocommit=True) as connection:
            for name in names:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        for each in scratch:
            migrate(each)
        yield scratch
    finally:
        with connect(settings, autocommit=True) as connection:  # One by one: a transaction has room for few locks.
            for name in names:
                connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))
        admin = AdminClient(client_config(settings))
        topics = [topic for topic in admin.list_topics(timeout=10).topics if topic.startswith(prefix)]
        for future in admin.delete_topics(topics, operation_timeout=60).values() if topics else ():
            future.result(60)
