"""Records are those that Debezium makes of the same rows, byte for byte.

`debezium_records.json` was recorded with Debezium 3.0.8 and Kafka Connect 3.9. Each of its cases has a configuration,
the further columns of a table, its rows, and what a consumer received. It has a timestamp only if that is a column's,
and a partition only if the topic had several.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from psycopg import sql

from outbox_plugin import Harvester, Settings
from outbox_plugin.debezium.event_router import Form, event_router
from outbox_plugin.debezium.switch import outbox_view
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import create_topic, drained
from tests.support import PATIENCE

pytestmark = pytest.mark.integration
RECORDED: list[dict[str, Any]] = json.loads(Path(__file__).with_name("debezium_records.json").read_text("utf-8"))
CONNECTOR = {
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "table.include.list": "public.outboxevent",
    "transforms": "outbox",
    "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
}


def as_bytes(recorded: str | dict[str, str] | None) -> bytes | None:
    if isinstance(recorded, dict):
        return bytes.fromhex(recorded["hex"])
    return None if recorded is None else recorded.encode()


def insert(connection: psycopg.Connection[Any], row: dict[str, Any]) -> None:
    values = [as_bytes(value) if isinstance(value, dict) else value for value in row.values()]
    connection.execute(
        sql.SQL("INSERT INTO outboxevent ({}) VALUES ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, row)), sql.SQL(", ").join(sql.Placeholder() * len(row))
        ),
        values,
    )


def received(settings: Settings, topic: str, partitions: int, count: int) -> dict[str, Message]:
    """The records of the topic by the value of their first header, the id."""
    config = {
        "bootstrap.servers": settings.bootstrap_servers,
        "group.id": "reader",
        "isolation.level": "read_committed",
    }
    found: dict[str, Message] = {}
    with closing(Consumer(config)) as consumer:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        for message in consumer.consume(count, timeout=20 * PATIENCE):
            headers: Any = message.headers()
            found[headers[0][1].decode()] = message
    return found


@pytest.mark.parametrize("case", RECORDED, ids=[case["name"] for case in RECORDED])
def test_records_are_debeziums(unmigrated: Settings, case: dict[str, Any]) -> None:
    settings = unmigrated.model_copy(update={"table": "outboxevent_relayed"})
    router = event_router(CONNECTOR | case["properties"])
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE outboxevent (id UUID PRIMARY KEY, aggregatetype VARCHAR(255) NOT NULL, "
            f"aggregateid VARCHAR(255), type VARCHAR(255), {case['columns']})"
        )
        for statement in outbox_view(settings, router).preparation():
            connection.execute(statement)
        migrate(settings)
        connection.execute(outbox_view(settings, router).switch()[0])
        # A row without a key is parked here, as all that an order could be kept by is missing.
        records = [each for each in case["records"] if each["key"] is not None]
        topic = f"{settings.group}-{case['name']}"
        prefix, suffix = router.topic_prefix, router.topic_suffix
        assert {record["topic"] for record in records} == {f"{prefix}{case['name']}{suffix}"}
        partitions = 1 + max(record.get("partition", 0) for record in records)
        create_topic(settings, f"{prefix}{topic}{suffix}", partitions)
        with Harvester(settings):
            for record in records:
                insert(connection, record["row"] | {"aggregatetype": topic})
            drained(settings)
    found = received(settings, f"{prefix}{topic}{suffix}", partitions, len(records))
    assert set(found) == {record["row"]["id"] for record in records}
    for record in records:
        message = found[record["row"]["id"]]
        assert (message.key(), message.value()) == (as_bytes(record["key"]), as_bytes(record["value"]))
        assert message.headers() == [(name, as_bytes(text)) for name, text in record["headers"]]
        assert message.partition() == record.get("partition", 0)
        assert message.timestamp()[1] == record.get("timestamp", message.timestamp()[1])


def test_all_forms_were_recorded() -> None:
    routers = [event_router(CONNECTOR | case["properties"]) for case in RECORDED]
    assert {router.value_form for router in routers} == set(Form)
    assert {router.key_form for router in routers} == set(Form)
    assert any(router.timestamp_column for router in routers)
    assert any(router.partition_column for router in routers)
    assert any(router.envelope for router in routers)
