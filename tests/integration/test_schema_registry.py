"""Keys and values of a schema registry: from emit through Kafka to the registry's own deserializers.

The registry is a server of the tests that speaks the real protocol, to the real client.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Message
from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    record_subject_name_strategy,
    topic_record_subject_name_strategy,
    topic_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.type.money_pb2 import Money
from pydantic import BaseModel, Field

from outbox_plugin import Event, Harvester, Outbox, Settings
from outbox_plugin.consuming import Received, consume_range
from outbox_plugin.consuming.positions import read_position
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import plan
from outbox_plugin.emit import schema_registry
from outbox_plugin.encoding import as_bytes, registered, registered_key
from outbox_plugin.errors import InvalidEvent, RegistryUnavailable, ServerRefused
from outbox_plugin.inbox import Inbox, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from outbox_plugin.schema.migrate import migrate
from tests.emit_connections import DRIVERS, Driver, awaited
from tests.harvesting import create_topic
from tests.inbox_support import query
from tests.schema_registry import Registry, a_registry
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration


class OrderId(BaseModel):
    number: int = Field(alias="no")


class Order(BaseModel):
    total: int
    note: str = Field(alias="theNote")


KEY = '{"type": "record", "name": "OrderId", "namespace": "shop", "fields": [{"name": "no", "type": "long"}]}'
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [{"name": "total", "type": "long"}, {"name": "theNote", "type": "string"}],
}
JSON_SCHEMA = json.dumps(
    {"title": "Order", "type": "object", "properties": {"total": {"type": "integer"}, "theNote": {"type": "string"}}}
)
ORDER = {"total": 12, "theNote": "grüße"}
Read = Callable[[bytes, SerializationContext], Any]


def evolved(**field: Any) -> str:
    """The schema of orders with one more field."""
    return json.dumps({**AVRO, "fields": [*AVRO["fields"], field]})


@pytest.fixture
def registry() -> Iterator[Registry]:
    with a_registry() as registry:
        yield registry
    eventually(lambda: all(each.name != "outbox-serializer" for each in threading.enumerate()), 30)


@pytest.fixture
def client(registry: Registry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": registry.url, "max.retries": 0}) as client:
        yield client


def avro(client: SchemaRegistryClient, schema: str = json.dumps(AVRO), **options: Any) -> Outbox:
    conf = {name.replace("_", "."): value for name, value in options.items()}
    return Outbox(serializer=registered(AvroSerializer(client, schema, conf=conf)))


def of_avro(client: SchemaRegistryClient) -> tuple[Any, Read]:
    return AvroSerializer(client, json.dumps(AVRO)), AvroDeserializer(client)


def of_json(client: SchemaRegistryClient) -> tuple[Any, Read]:
    return JSONSerializer(JSON_SCHEMA, client), JSONDeserializer(None, schema_registry_client=client)


def of_protobuf(client: SchemaRegistryClient) -> tuple[Any, Read]:
    return ProtobufSerializer(Money, client), ProtobufDeserializer(Money)


def consumed(settings: Settings, topic: str, count: int) -> list[Message]:
    """The first records of a topic of one partition."""
    config: dict[str, Any] = {
        "bootstrap.servers": settings.bootstrap_servers,
        "group.id": f"{uuid.uuid4()}",
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
    }
    found: list[Message] = []
    deadline = time.monotonic() + 60 * PATIENCE
    with closing(Consumer(config)) as consumer:
        consumer.subscribe([topic])
        while len(found) < count:
            assert time.monotonic() < deadline
            found += [message for message in consumer.consume(count, 0.2) if message.error() is None]
    return found


def value_of(message: Message) -> bytes:
    value = message.value()
    assert value is not None
    return bytes(value)


@pytest.mark.parametrize("of_bytes", [False, True], ids=["values of text", "values of bytes"])
@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (of_avro, ORDER, ORDER),
        (of_avro, Order(total=12, theNote="grüße"), ORDER),
        (of_json, ORDER, ORDER),
        (of_json, Order(total=12, theNote="grüße"), ORDER),
        (of_protobuf, Money(currency_code="EUR", units=5), Money(currency_code="EUR", units=5)),
    ],
    ids=["avro", "avro of a model", "json schema", "json schema of a model", "protobuf"],
)
def test_what_is_emitted_is_what_a_deserializer_reads(
    settings: Settings,
    client: SchemaRegistryClient,
    group: str,
    kind: Callable[[SchemaRegistryClient], tuple[Any, Read]],
    value: Any,
    read: Any,
    of_bytes: bool,
) -> None:
    """With keys of Avro, in a table of either type. A tombstone stays one, a partition is kept beside such a value."""
    if of_bytes:
        query(settings, "ALTER TABLE outbox ALTER kafka_value TYPE BYTEA USING NULL")
    topic = create_topic(settings, f"{group}-orders", 1)
    serialize, deserialize = kind(client)
    key = registered_key(AvroSerializer(client, KEY))
    outbox = Outbox(serializer=registered(serialize))
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        outbox.emit(connection, Event(topic=topic, key=key(topic, OrderId(no=17)), value=value))
        more = [
            Event(topic=topic, key=key(topic, {"no": 17}), value=None),
            Event(topic=topic, key="text", value=value, headers={"naïve": "grüße"}),
            Event(topic=topic, key="text", value=value, partition=0, headers=[("a", b"\xff"), ("a", None)]),
        ]
        outbox.emit_many(connection, more)
    with Harvester(settings):
        first, second, third, fourth = consumed(settings, topic, 4)
    context = SerializationContext(topic, MessageField.VALUE)
    assert [deserialize(value_of(each), context) for each in (first, third, fourth)] == [read] * 3
    assert second.value() is None
    key_context = SerializationContext(topic, MessageField.KEY)
    of_key = AvroDeserializer(client)
    assert [of_key(bytes(each.key() or b""), key_context) for each in (first, second)] == [{"no": 17}] * 2
    assert [each.key() for each in (third, fourth)] == [b"text"] * 2
    assert dict(third.headers() or [])["naïve"] == "grüße".encode()
    assert [header for header in fourth.headers() or [] if header[0] == "a"] == [("a", b"\xff"), ("a", None)]


def test_each_kind_of_connection_takes_such_values(settings: Settings, client: SchemaRegistryClient) -> None:
    async def scenario(driver: Driver) -> None:
        outbox = avro(client)
        async with driver.transaction(settings.dsn.get_secret_value()) as connection:
            await awaited(outbox.emit(connection, Event(topic="t", key=driver.name, value=ORDER)))
            await awaited(outbox.emit_many(connection, [Event(topic="t", key=driver.name, value=ORDER)] * 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        for driver in DRIVERS:
            asyncio.run(scenario(driver))
    found = query(settings, "SELECT kafka_key, kafka_value, kafka_value_bytes FROM outbox ORDER BY id")
    assert [row[:2] for row in found] == [(driver.name, None) for driver in DRIVERS for _ in range(3)]
    assert len({row[2] for row in found}) == 1
    assert found[0][2][:5] == b"\0\0\0\0\1"


def test_bytes_of_any_serializer_go_into_a_table_of_text(settings: Settings) -> None:
    """Where they are a text, they lie in the value, as other texts do."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        Outbox(serializer=as_bytes).emit(connection, Event(topic="t", key="k", value={"by": "ü"}))
        Outbox(serializer=as_bytes).emit(connection, Event(topic="t", key="k", value=b"\xff"))
    found = query(settings, "SELECT kafka_value, kafka_value_bytes FROM outbox ORDER BY id")
    assert found == [('{"by":"ü"}', None), (None, b"\xff")]


def test_bytes_that_failed_before_there_was_a_table_go_into_it_as_bytes(unmigrated: Settings) -> None:
    """Into a column of text, Postgres would write the text of their notation."""
    outbox, event = Outbox(serializer=as_bytes), Event(topic="t", key="k", value=b"\xff")
    with psycopg.connect(unmigrated.dsn.get_secret_value()) as connection:
        with pytest.raises(psycopg.errors.UndefinedTable):
            outbox.emit(connection, event)
        connection.rollback()
        migrate(unmigrated)
        outbox.emit(connection, event)
    assert query(unmigrated, "SELECT kafka_value, kafka_value_bytes FROM outbox") == [(None, b"\xff")]


@pytest.mark.parametrize(
    ("strategy", "subjects"),
    [
        (topic_subject_name_strategy, {"t-key", "t-value"}),
        (record_subject_name_strategy, {"shop.OrderId", "shop.Order"}),
        (topic_record_subject_name_strategy, {"t-shop.OrderId", "t-shop.Order"}),
    ],
    ids=["topic", "record", "topic and record"],
)
def test_subjects_are_named_by_the_serializers_strategy(
    settings: Settings, registry: Registry, client: SchemaRegistryClient, strategy: Any, subjects: set[str]
) -> None:
    key = registered_key(AvroSerializer(client, KEY, conf={"subject.name.strategy": strategy}))
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        event = Event(topic="t", key=key("t", {"no": 1}), value=ORDER)
        avro(client, subject_name_strategy=strategy).emit(connection, event)
    assert set(registry.subjects) == subjects


def test_a_schema_evolves_and_one_that_readers_could_not_read_is_refused(
    settings: Settings, registry: Registry, client: SchemaRegistryClient
) -> None:
    """The caller's transaction is as it was: it commits what else it wrote."""
    wider = evolved(name="by", type="string", default="?")
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn) as connection:
        avro(client).emit(connection, Event(topic="t", key="a", value=ORDER))
        avro(client, wider).emit(connection, Event(topic="t", key="b", value={**ORDER, "by": "me"}))
        strict = avro(client, evolved(name="to", type="string"))
        with pytest.raises(InvalidEvent, match="incompatible with an earlier schema") as caught:
            strict.emit(connection, Event(topic="t", key="c", value={**ORDER, "to": "you"}))
        with pytest.raises(InvalidEvent, match="incompatible with an earlier schema"):
            strict.emit_many(connection, (Event(topic="t", key="c", value={**ORDER, "to": "you"}) for _ in range(3)))
        avro(client).emit(connection, Event(topic="t", key="d", value=ORDER))
    assert (caught.value.field, len(str(caught.value).splitlines())) == ("value", 1)
    assert registry.subjects == {"t-value": [1, 2]}
    found = query(settings, "SELECT kafka_key, kafka_value_bytes FROM outbox ORDER BY id")
    assert [key for key, _ in found] == ["a", "b", "d"]
    read = AvroDeserializer(client, wider)
    assert [read(value, SerializationContext("t", MessageField.VALUE)) for _, value in found] == [
        {**ORDER, "by": "?"},
        {**ORDER, "by": "me"},
        {**ORDER, "by": "?"},
    ]


def test_a_schema_that_nobody_registered_is_refused_where_serializers_may_not_register(
    settings: Settings, client: SchemaRegistryClient
) -> None:
    key = registered_key(AvroSerializer(client, KEY, conf={"auto.register.schemas": False}))
    with pytest.raises(InvalidEvent, match="not found") as caught:
        key("t", {"no": 1})
    assert caught.value.field == "key"
    with psycopg.connect(settings.dsn.get_secret_value()) as connection, pytest.raises(InvalidEvent, match="not found"):
        avro(client, auto_register_schemas=False).emit(connection, Event(topic="t", key="k", value=ORDER))


def test_a_key_that_does_not_fit_its_schema_is_refused(client: SchemaRegistryClient) -> None:
    key = registered_key(AvroSerializer(client, KEY))
    for wrong in ({"no": "one"}, {}, None, 5):
        with pytest.raises(InvalidEvent) as caught:
            key("t", wrong)
        assert caught.value.field == "key"


def go_silent(registry: Registry) -> None:
    registry.silent.set()


def fail(registry: Registry) -> None:
    registry.failing = 503


def answer_a_page(registry: Registry) -> None:
    registry.page = b"<html>Log in</html>"


@pytest.mark.parametrize(
    ("misbehave", "problem"),
    [(go_silent, "did not answer within 1 seconds"), (fail, "failed"), (answer_a_page, "what is no JSON")],
)
def test_a_registry_that_is_away_leaves_the_transaction_as_it_was(
    settings: Settings,
    registry: Registry,
    client: SchemaRegistryClient,
    misbehave: Callable[[Registry], None],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A schema that was used before needs no registry. Another one fails in a bounded time, and works later."""
    known, other = avro(client), avro(client, evolved(name="by", type="string", default="?"))
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        known.emit(connection, Event(topic="t", key="a", value=ORDER))
        asked = len(registry.requests)
        misbehave(registry)
        known.emit(connection, Event(topic="t", key="b", value=ORDER))
        assert len(registry.requests) == asked
        monkeypatch.setattr(schema_registry, "REGISTRY_SECONDS", 1.0)
        with pytest.raises(RegistryUnavailable, match=problem) as caught:
            other.emit(connection, Event(topic="t", key="c", value={**ORDER, "by": "me"}))
        assert len(str(caught.value).splitlines()) == 1
        monkeypatch.undo()
        registry.silent.clear()
        registry.failing = registry.page = None
        other.emit(connection, Event(topic="t", key="d", value={**ORDER, "by": "me"}))
    assert query(settings, "SELECT kafka_key FROM outbox ORDER BY id") == [("a",), ("b",), ("d",)]


def test_a_registry_that_nobody_runs(settings: Settings) -> None:
    with a_registry() as gone:
        url = gone.url
    conf = {"url": url, "max.retries": 1, "retries.wait.ms": 1}
    with SchemaRegistryClient(conf) as client, psycopg.connect(settings.dsn.get_secret_value()) as connection:
        outbox = avro(client)
        with pytest.raises(RegistryUnavailable, match="cannot be reached"):
            outbox.emit(connection, Event(topic="t", key="k", value=ORDER))
        Outbox().emit(connection, Event(topic="t", key="k", value="after"))
    assert query(settings, "SELECT kafka_value FROM outbox") == [("after",)]


def test_a_registry_that_wants_other_credentials(
    settings: Settings, registry: Registry, client: SchemaRegistryClient
) -> None:
    registry.failing = 401
    with psycopg.connect(settings.dsn.get_secret_value()) as connection, pytest.raises(ServerRefused, match="401"):
        avro(client).emit(connection, Event(topic="t", key="k", value=ORDER))


def test_consumers_get_such_records_as_they_were_made(
    settings: Settings, client: SchemaRegistryClient, group: str
) -> None:
    """A handler of an inbox, also when a dead letter comes back, and a range. A tombstone has no value, but its key."""
    topic = create_topic(settings, f"{group}-orders", 1)
    key = registered_key(AvroSerializer(client, KEY))
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        events = [Event(topic=topic, key=key(topic, {"no": 17}), value=value) for value in (ORDER, None)]
        avro(client).emit_many(connection, events)
    of_key, of_value = AvroDeserializer(client), AvroDeserializer(client)

    def read(event: Received) -> tuple[Any, Any]:
        return (
            of_key(event.key, SerializationContext(topic, MessageField.KEY)),
            of_value(event.value, SerializationContext(topic, MessageField.VALUE)),
        )

    handled: list[tuple[Any, Any]] = []
    is_bad = threading.Event()
    is_bad.set()

    def handle(_: psycopg.Connection[Any], event: Received) -> None:
        if is_bad.is_set():
            event.json()  # Of Avro, it raises ValueError; of a tombstone, it is None.
            raise RuntimeError("not today")
        handled.append(read(event))

    with Harvester(settings), Inbox(settings, group=group, topics=[topic], handler=handle, retry=Retry(attempts=1)):
        eventually(lambda: len(DeadLetters(settings).list()) == 2, 60)
        letters = DeadLetters(settings).list()
        assert [letter.key for letter in letters] == [events[0].key] * 2
        assert "UnicodeDecodeError" in letters[0].error
        is_bad.clear()
        DeadLetters(settings).retry(None)
        eventually(lambda: len(handled) == 2, 60)
    assert handled == [({"no": 17}, ORDER), ({"no": 17}, None)]
    found: list[tuple[Any, Any]] = []
    planned = plan("totals", topic, read_position(settings, "totals", topic), topic_state(settings, topic), 1000)
    assert planned.range is not None
    consume_range(settings, planned.range, lambda _, records: found.extend(map(read, records)))
    assert found == handled
