"""Moving here from Debezium: records with a timestamp of the table's, and with keys that are bytes."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import backlog, create_topic, drained
from tests.integration.test_debezium import TABLE, connector, outbox, prepare, refused, run, server, written
from tests.integration.test_debezium_tables import switch
from tests.integration.test_whole_records import records
from tests.support import eventually

pytestmark = pytest.mark.integration
__all__ = ["connector", "outbox", "server"]  # Fixtures.

TIMESTAMP = "transforms.outbox.table.field.event.timestamp"
KEY = "transforms.outbox.table.field.event.key"
HEADERS = "transforms.outbox.table.fields.additional.placement"
BINARY = {
    "key.converter": "io.debezium.converters.BinaryDataConverter",
    "key.converter.delegate.converter.type": "org.apache.kafka.connect.json.JsonConverter",
}
EITHER = pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])


def switched(outbox: Settings, folder: Path, delivery: Delivery, changed: dict[str, str]) -> tuple[Settings, str]:
    """The settings after the change-over from a connector with `changed` properties, and the topic of its records."""
    file = written(folder, changed)
    settings = outbox.model_copy(update={"delivery": delivery})
    prepare(settings, file)
    switch(settings, file)
    return settings, create_topic(settings, f"outbox.event.{settings.group}", 1)


def insert(settings: Settings, **columns: object) -> None:
    columns = {"id": uuid.uuid4(), "aggregatetype": settings.group, "aggregateid": "k", **columns}
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("INSERT INTO outboxevent ({}) VALUES ({})").format(
                sql.SQL(", ").join(map(sql.Identifier, columns)), sql.SQL(", ").join(sql.Placeholder() * len(columns))
            ),
            list(columns.values()),
        )


@EITHER
def test_the_columns_timestamp_becomes_the_records(outbox: Settings, tmp_path: Path, delivery: Delivery) -> None:
    run(outbox, "ALTER TABLE outboxevent ADD at TIMESTAMP")
    changed = {TIMESTAMP: "at", HEADERS: "type:header:eventType,at:header"}
    settings, topic = switched(outbox, tmp_path, delivery, changed)
    identity, started = uuid.uuid4(), time.time()
    at = datetime(2026, 1, 2, 3, 4, 5, 678_901)
    insert(settings, id=identity, type="Grüße 😀", payload='{"a": 1}', at=at)
    for odd in (None, "infinity", "-infinity", "1969-12-31 23:59:59", "1970-01-01", "10000-01-01"):
        insert(settings, at=odd)
    with Harvester(settings):
        drained(settings)
    first, *others = records(settings, topic)
    millis = (int(at.replace(tzinfo=UTC).timestamp()) * 1_000) + 678
    assert (first.key, first.value, first.timestamp) == (b"k", b'{"a": 1}', millis)
    assert first.headers == [
        ("id", str(identity).encode()),
        ("eventType", "Grüße 😀".encode()),
        ("at", f"{millis}901".encode()),
    ]
    assert len(others) == 6
    assert all(started - 60 < record.timestamp / 1_000 < time.time() + 60 for record in others)
    assert all(record.headers[1:] == [("eventType", None), ("at", record.headers[2][1])] for record in others)


@EITHER
def test_bytes_are_keys_and_keep_their_order(outbox: Settings, tmp_path: Path, delivery: Delivery) -> None:
    run(outbox, "ALTER TABLE outboxevent ADD entity BYTEA")
    settings, topic = switched(outbox, tmp_path, delivery, {KEY: "entity", **BINARY})
    keys = [b"\x00\xff\x80", b"text", b"", b"\x81" * 49]
    for number in range(3):
        for key in keys:
            insert(settings, entity=key, payload=str(number))
    insert(settings, entity=None, payload="3")
    with Harvester(settings):
        eventually(lambda: backlog(settings) == 1, 60)
        eventually(lambda: len(operate.parked_keys(settings)) == 1, 60)
    found = records(settings, topic)
    assert {key: [record.value for record in found if record.key == key] for key in keys} == {
        key: [b"0", b"1", b"2"] for key in keys
    }
    assert len(found) == 3 * len(keys)


@EITHER
def test_published_rows_are_kept_with_their_timestamps(outbox: Settings, tmp_path: Path, delivery: Delivery) -> None:
    run(outbox, "ALTER TABLE outboxevent ADD at TIMESTAMP")
    settings, _ = switched(outbox, tmp_path, delivery, {TIMESTAMP: "at"})
    settings = settings.model_copy(update={"retention": timedelta(days=1)})
    insert(settings, at=datetime(2026, 1, 2))
    with Harvester(settings):
        drained(settings)
    assert run(settings, "SELECT kafka_timestamp FROM outbox_history") == [(datetime(2026, 1, 2, tzinfo=UTC),)]


@pytest.mark.parametrize("changed", [{TIMESTAMP: "at"}, {KEY: "entity", **BINARY}], ids=["timestamp", "key"])
def test_a_database_in_another_encoding_is_refused(outbox: Settings, tmp_path: Path, changed: dict[str, str]) -> None:
    """A text that cannot be written in UTF-8 would end each read, and so hold up all keys."""
    name, dsn = f"encoded_{uuid.uuid4().hex[:12]}", outbox.dsn.get_secret_value()
    run(outbox, f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    there = outbox.model_copy(update={"dsn": type(outbox.dsn)(f"{dsn.rpartition('/')[0]}/{name}")})
    try:
        run(there, f"{TABLE}; ALTER TABLE outboxevent ADD at TIMESTAMP, ADD entity BYTEA")
        assert "need a database in the encoding UTF8 (given: SQL_ASCII)" in refused(
            "prepare", there, written(tmp_path, changed)
        )
    finally:
        run(outbox, f"DROP DATABASE {name} WITH (FORCE)")


def test_a_view_can_be_replaced_while_its_rows_are_relayed(outbox: Settings, tmp_path: Path) -> None:
    """As by a connector's file to which the column of the timestamp was added later, and from which it was removed."""
    run(outbox, "ALTER TABLE outboxevent ADD at TIMESTAMP")
    settings, topic = switched(outbox, tmp_path, "exactly-once", {})
    with Harvester(settings):
        insert(settings, at=datetime(2026, 1, 2), payload="1")
        drained(settings)
        prepare(settings, written(tmp_path, {TIMESTAMP: "at"}))
        migrate(settings)
        insert(settings, at=datetime(2026, 1, 2), payload="2")
        drained(settings)
        prepare(settings, written(tmp_path, {}))
        insert(settings, at=datetime(2026, 1, 2), payload="3")
        drained(settings)
    first, second, third = records(settings, topic)
    assert [(each.value, len(each.headers)) for each in (first, second, third)] == [(b"1", 1), (b"2", 1), (b"3", 1)]
    assert second.timestamp == int(datetime(2026, 1, 2, tzinfo=UTC).timestamp()) * 1_000
    assert third.timestamp > first.timestamp > second.timestamp
