"""Events are written in the caller's transaction, whoever the caller is, and leave with it or not at all."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import psycopg
import pytest
import sqlalchemy
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from django.db import connections
from google.type.money_pb2 import Money
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from outbox_plugin import Event, Harvester, Outbox, Settings
from outbox_plugin.emit.drivers import ROWS_AT_A_TIME
from outbox_plugin.emit.row_encoder import Serializer, as_bytes
from outbox_plugin.emit.schema_registry import registered
from outbox_plugin.errors import InvalidEvent, WrongConnection
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.schema.migrate import migrate
from tests.emit_connections import DRIVERS, Driver, Undo, awaited, django_alias, url
from tests.inbox_support import query
from tests.support import eventually

pytestmark = pytest.mark.integration

Scenario = Callable[[Driver, str], Coroutine[Any, Any, None]]


def event(value: str) -> Event:
    return Event(topic="t", key="k", value=value, headers={"naïve": 'grüße, {"a"}, \\ and NULL'})


def values(settings: Settings) -> list[str]:
    return [value for (value,) in query(settings, "SELECT kafka_value FROM outbox ORDER BY id")]


@pytest.fixture(params=DRIVERS, ids=[each.name for each in DRIVERS])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # Scenarios are coroutines, for all drivers alike.
    found: Driver = request.param
    return found


def run(scenario: Scenario, driver: Driver, settings: Settings) -> None:
    asyncio.run(scenario(driver, settings.dsn.get_secret_value()))


def test_a_generator_of_many_events_is_written_as_a_whole_or_not_at_all(settings: Settings, driver: Driver) -> None:
    outbox, many = Outbox(), 2 * ROWS_AT_A_TIME + 1

    def events(*, broken: bool) -> Iterator[Event]:
        for number in range(many):
            yield event(str(number))
        if broken:
            raise Undo

    async def scenario(driver: Driver, dsn: str) -> None:
        async with driver.transaction(dsn) as target:
            await awaited(outbox.emit(target, event("before")))
            with pytest.raises(Undo):
                await awaited(outbox.emit_many(target, events(broken=True)))
            with pytest.raises(InvalidEvent):
                await awaited(outbox.emit_many(target, chain(events(broken=False), [event("x" * 1_000_000)])))
            await awaited(outbox.emit_many(target, events(broken=False)))

    run(scenario, driver, settings)
    assert values(settings) == ["before", *map(str, range(many))]


def test_a_generator_of_many_events_needs_the_memory_of_few(settings: Settings) -> None:
    def most_bytes(events: int) -> int:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            tracemalloc.start()
            try:
                Outbox().emit_many(connection, (event(str(number)) for number in range(events)))
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
                connection.rollback()

    most_bytes(ROWS_AT_A_TIME)
    assert most_bytes(20 * ROWS_AT_A_TIME) < 2 * most_bytes(2 * ROWS_AT_A_TIME)


def test_events_leave_with_the_transaction_and_only_then(settings: Settings, driver: Driver) -> None:
    outbox = Outbox()

    async def scenario(driver: Driver, dsn: str) -> None:
        async with driver.transaction(dsn) as target:
            await awaited(outbox.emit(target, event("1")))
            assert values(settings) == []
            await awaited(outbox.emit_many(target, [event("2"), event("3")]))
            await awaited(outbox.emit_many(target, []))
            with suppress(Undo):
                async with driver.savepoint(target):
                    await awaited(outbox.emit(target, event("undone")))
                    raise Undo
            async with driver.savepoint(target):
                await awaited(outbox.emit(target, event("4")))
        with suppress(Undo):
            async with driver.transaction(dsn) as target:
                await awaited(outbox.emit(target, event("undone")))
                raise Undo

    run(scenario, driver, settings)
    assert values(settings) == ["1", "2", "3", "4"]
    [(names, texts)] = query(settings, "SELECT DISTINCT kafka_header_keys[3:], kafka_header_values[3:] FROM outbox")
    assert dict(zip(names, texts, strict=True)) == {"naïve": 'grüße, {"a"}, \\ and NULL'}


def test_many_events_are_written_as_they_are_and_in_their_order(settings: Settings, driver: Driver) -> None:
    """In more than one statement, with values, headers and tombstones that would break a careless one."""
    odd = ["", " ", "NULL", "{}", '"', "\\", "'", ",", "%s", "$1", ":name", "grüße\n", '\\"', "a\tb"]
    events = [
        Event(
            topic="t", key=text, value=None if number % 3 == 0 else text, headers={f"h{text}": text, "n": str(number)}
        )
        for number, text in enumerate(odd * 200)
    ]

    async def scenario(driver: Driver, dsn: str) -> None:
        async with driver.transaction(dsn) as target:
            await awaited(Outbox().emit_many(target, events))

    run(scenario, driver, settings)
    columns = "kafka_key, kafka_value, kafka_header_keys, kafka_header_values"
    rows = query(settings, f"SELECT {columns} FROM outbox ORDER BY id")
    assert len(rows) == len(events) > 2 * ROWS_AT_A_TIME
    for event, (key, value, names, texts) in zip(events, rows, strict=True):
        assert (key, value) == (event.key, event.value)
        assert list(zip(names, texts, strict=True)) == event.header_items()


def test_a_listener_writes_at_the_end_of_its_unit_of_work(settings: Settings, driver: Driver) -> None:
    outbox = Outbox()

    async def unit(target: Any, value: str, fails: bool = False) -> None:
        """What `async with outbox.listener(target)` does, or `with` where the connection is not async."""
        listening: Any = outbox.listener(target)
        if hasattr(target, "run_sync") or isinstance(target, psycopg.AsyncConnection):
            async with listening as listener:
                listener.occurred(event(f"{value}.1"))
                listener.occurred(event(f"{value}.2"))
                if fails:
                    raise Undo
        else:
            with listening as listener:
                listener.occurred(event(f"{value}.1"))
                listener.occurred(event(f"{value}.2"))
                if fails:
                    raise Undo

    async def scenario(driver: Driver, dsn: str) -> None:
        async with driver.transaction(dsn) as target:
            await unit(target, "kept")
            with suppress(Undo):  # The caller goes on, but the unit's events are not those of work that was done.
                await unit(target, "failed", fails=True)
            with suppress(Undo):
                async with driver.savepoint(target):
                    await unit(target, "in a savepoint, undone")
                    raise Undo
            async with driver.savepoint(target):
                await unit(target, "in a savepoint")
        with suppress(Undo):
            async with driver.transaction(dsn) as target:
                await unit(target, "undone")
                raise Undo

    run(scenario, driver, settings)
    assert values(settings) == ["kept.1", "kept.2", "in a savepoint.1", "in a savepoint.2"]


def test_nothing_of_a_call_is_written_if_one_of_its_events_is_refused(settings: Settings, driver: Driver) -> None:
    async def scenario(driver: Driver, dsn: str) -> None:
        async with driver.transaction(dsn) as target:
            with pytest.raises(InvalidEvent):
                await awaited(Outbox().emit_many(target, [event("1"), event("x" * 1_000_000)]))

    run(scenario, driver, settings)
    assert values(settings) == []


def test_a_connection_without_a_transaction_of_the_callers_is_refused(settings: Settings) -> None:
    """An event that leaves by itself is what an outbox is there to prevent."""
    outbox, dsn = Outbox(), settings.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as connection:
        with pytest.raises(WrongConnection, match="emit inside"):
            outbox.emit(connection, event("1"))
        with pytest.raises(WrongConnection, match="autocommit"), outbox.listener(connection):
            pytest.fail("it is refused before the work is done")
        with connection.transaction():
            outbox.emit(connection, event("in a transaction"))
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as alone,
        pytest.raises(WrongConnection, match="autocommit"),
    ):
        outbox.emit(alone, event("1"))
    engine.dispose()
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"), isolation_level="AUTOCOMMIT")
    for target in (engine.connect(), Session(engine)):
        with target, pytest.raises(WrongConnection, match="autocommit"):
            outbox.emit(target, event("1"))
    engine.dispose()
    connection_of_django = connections[django_alias(dsn)]
    with pytest.raises(WrongConnection, match=r"transaction\.atomic"):
        outbox.emit(connection_of_django, event("1"))
    connection_of_django.close()
    with pytest.raises(WrongConnection, match="SELECT outbox_emit"):
        outbox.emit(object(), event("1"))  # type: ignore[call-overload]
    assert values(settings) == ["in a transaction"]


class Lent:
    """A connection of psycopg's whose transaction its borrower cannot end, as an inbox's handler may lend its own."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def commit(self) -> None:
        pass

    rollback = close = commit


def test_a_connection_that_is_lent_to_sqlalchemy_in_its_lenders_transaction_is_taken(settings: Settings) -> None:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        engine = sqlalchemy.create_engine(
            "postgresql+psycopg://", creator=lambda: Lent(connection), use_native_hstore=False
        )
        with connection.transaction(force_rollback=True), Session(engine) as session:
            Outbox().emit(session, event("undone"))
            session.commit()
        with connection.transaction(), Session(engine) as session:
            Outbox().emit(session, event("1"))
        with Session(engine) as session, pytest.raises(WrongConnection, match="autocommit"):
            Outbox().emit(session, event("2"))
    assert values(settings) == ["1"]


@pytest.mark.parametrize("name", ["psycopg", "asyncpg"])
def test_an_async_engine_in_autocommit_mode_is_refused(settings: Settings, name: str) -> None:
    async def scenario() -> None:
        engine = create_async_engine(url(settings.dsn.get_secret_value(), name), isolation_level="AUTOCOMMIT")
        async with AsyncSession(engine) as session:
            with pytest.raises(WrongConnection, match="autocommit"):
                await Outbox().emit(session, event("1"))
        await engine.dispose()

    asyncio.run(scenario())
    assert values(settings) == []


def test_an_async_session_that_is_another_for_each_task_is_to_be_called() -> None:
    engine = create_async_engine("postgresql+asyncpg://nowhere")
    sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: None)
    with pytest.raises(WrongConnection, match="call the async_scoped_session, and emit on the session"):
        Outbox().emit(sessions, event("1"))


def test_another_database_is_refused() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(WrongConnection, match="sqlite"):
        Outbox().emit(connection, event("1"))
    engine.dispose()


def test_a_listener_of_the_other_kind_is_refused(settings: Settings) -> None:
    async def scenario() -> None:
        async with await psycopg.AsyncConnection.connect(settings.dsn.get_secret_value()) as connection:
            with pytest.raises(WrongConnection, match="async with"), Outbox().listener(connection):
                pass

    asyncio.run(scenario())


def emit_in_sql(settings: Settings, *values: Any) -> str:
    [(key,)] = query(settings, f"SELECT outbox_emit({', '.join(['%s'] * len(values))})", *values)
    return str(key)


def test_any_language_emits_with_a_function(settings: Settings) -> None:
    key = emit_in_sql(settings, "orders", "o-1", '{"total": 12, "note": "grüße"}', '{"event-type": "Placed"}')
    emit_in_sql(settings, "orders", "o-1", None)
    assert emit_in_sql(settings, "orders", "o-2", "[1]", '{"idempotency-key": "mine"}') == "mine"
    rows = query(
        settings, "SELECT kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values FROM outbox"
    )
    assert [row[:2] for row in rows] == [("orders", "o-1"), ("orders", "o-1"), ("orders", "o-2")]
    assert [row[2] and json.loads(row[2]) for row in rows] == [{"total": 12, "note": "grüße"}, None, [1]]
    headers = dict(zip(rows[0][3], rows[0][4], strict=True))
    occurred_at = datetime.fromisoformat(headers.pop("occurred-at"))
    assert abs((datetime.now(UTC) - occurred_at).total_seconds()) < 60
    assert headers == {"event-type": "Placed", "idempotency-key": key}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("topic", (None, "k", "1")),
        ("topic", ("no spaces", "k", "1")),
        ("topic", ("..", "k", "1")),
        ("topic", ("__consumer_offsets", "k", "1")),
        ("key", ("t", "k" * 101, "1")),
        ("key", ("t", None, "1")),
        ("headers", ("t", "k", "1", "[]")),
        ("headers.a", ("t", "k", "1", '{"a": 1}')),
        ("headers", ("t", "k", "1", '{"": "a"}')),
        ("value", ("t", "k", json.dumps("x" * 1_000_000))),
    ],
)
def test_the_function_names_what_is_wrong(settings: Settings, field: str, given: Iterable[Any]) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=rf"^{field}: "):
        emit_in_sql(settings, *given)


def test_each_outbox_of_a_schema_has_a_function_of_its_own(settings: Settings) -> None:
    other = settings.model_copy(update={"table": "other"})
    migrate(other)
    query(settings, "SELECT other_emit('t', 'k', '1'), outbox_emit('t', 'k', '2')")
    assert values(settings) == ["2"]
    assert query(settings, "SELECT kafka_value FROM other") == [("1",)]


@pytest.fixture
def of_bytes(settings: Settings) -> Settings:
    """Settings for an outbox whose values are BYTEA."""
    query(settings, "ALTER TABLE outbox ALTER kafka_value TYPE BYTEA USING NULL")
    return settings


def test_values_of_bytes(of_bytes: Settings) -> None:
    def stand_in(value: Any, context: SerializationContext | None = None) -> bytes | None:
        """As a schema registry's serializer is called."""
        assert context is not None
        assert (context.topic, context.field) == ("t", MessageField.VALUE)
        return b"\x00\x00\x00\x00\x01" + bytes([2 * value["by"]])

    with psycopg.connect(of_bytes.dsn.get_secret_value()) as connection:
        binary = Outbox(serializer=registered(stand_in))
        binary.emit(connection, Event(topic="t", key="k", value={"by": 5}))
        binary.emit(connection, Event(topic="t", key="k", value=None))
        with pytest.raises(InvalidEvent) as caught:
            binary.emit(connection, Event(topic="t", key="k", value={"by": "five"}))
        Outbox(serializer=as_bytes).emit(connection, Event(topic="t", key="k", value={"back\\": "slash"}))
        Outbox(serializer=as_bytes).emit(connection, Event(topic="t", key="k", value=b"\x00\xff"))
    assert caught.value.field == "value"
    found = [value for (value,) in query(of_bytes, "SELECT kafka_value FROM outbox ORDER BY id")]
    assert found[:2] == [b"\x00\x00\x00\x00\x01\x0a", None]
    assert (json.loads(found[2]), found[3]) == ({"back\\": "slash"}, b"\x00\xff")


def test_bytes_travel_from_emit_to_a_handler(of_bytes: Settings, topic: str, group: str) -> None:
    handled: list[tuple[str | None, bytes | None]] = []

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        handled.append((event.key_text, event.value))

    with psycopg.connect(of_bytes.dsn.get_secret_value()) as connection:
        binary = Outbox(serializer=as_bytes)
        values: list[Any] = [b"\x00\xff", {"back\\": "slash"}]
        binary.emit_many(connection, [Event(topic=topic, key="k", value=value) for value in values])
        connection.execute("SELECT outbox_emit(%s, 'k', %s)", (topic, '{"back\\\\": "slash"}'))
        binary.emit(connection, Event(topic=topic, key="k", value=None))
    with Harvester(of_bytes), Inbox(of_bytes, group=f"{group}-inbox", topics=[topic], handler=handle):
        eventually(lambda: len(handled) == 4, 60)
    assert [key for key, _ in handled] == ["k"] * 4
    [raw, python, sql, tombstone] = [value for _, value in handled]
    assert (raw, tombstone) == (b"\x00\xff", None)
    assert json.loads(python or b"") == json.loads(sql or b"") == {"back\\": "slash"}


class Debit(BaseModel):
    """As applications have it: with a type that JSON has not, and a name of its own on the wire."""

    by: int
    booked_at: datetime = Field(alias="bookedAt")


AVRO = """{"type": "record", "name": "Debit", "fields": [{"name": "by", "type": "long"},
    {"name": "bookedAt", "type": {"type": "long", "logicalType": "timestamp-millis"}}]}"""
JSON_SCHEMA = """{"title": "Debit", "type": "object", "required": ["by", "bookedAt"], "properties": {
    "by": {"type": "integer"}, "bookedAt": {"type": "string"}}}"""
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
Read = Callable[[bytes, SerializationContext], Any]


def avro(registry: SchemaRegistryClient) -> tuple[Serializer, Read]:
    return registered(AvroSerializer(registry, AVRO)), AvroDeserializer(registry)


def json_schema(registry: SchemaRegistryClient) -> tuple[Serializer, Read]:
    return registered(JSONSerializer(JSON_SCHEMA, registry)), JSONDeserializer(JSON_SCHEMA)


def protobuf(registry: SchemaRegistryClient) -> tuple[Serializer, Read]:
    return registered(ProtobufSerializer(Money, registry)), ProtobufDeserializer(Money)


@pytest.mark.parametrize(
    ("kind", "value", "read", "wrong"),
    [
        (avro, {"by": 5, "bookedAt": NOON}, {"by": 5, "bookedAt": NOON}, {"by": "five", "bookedAt": NOON}),
        (avro, Debit(by=5, bookedAt=NOON), {"by": 5, "bookedAt": NOON}, {"by": 5}),
        (json_schema, {"by": 5, "bookedAt": "12:00"}, {"by": 5, "bookedAt": "12:00"}, {"by": "five"}),
        (json_schema, Debit(by=5, bookedAt=NOON), {"by": 5, "bookedAt": NOON.isoformat()}, {"by": 5, "bookedAt": 12}),
        (protobuf, Money(currency_code="EUR", units=5), Money(currency_code="EUR", units=5), {"units": 5}),
    ],
    ids=["avro", "avro of a model", "json schema", "json schema of a model", "protobuf"],
)
def test_values_of_a_schema_registry(
    of_bytes: Settings,
    kind: Callable[[SchemaRegistryClient], tuple[Serializer, Read]],
    value: Any,
    read: Any,
    wrong: Any,
) -> None:
    """Written by the registry's serializers, and read by its deserializers, as a consumer would."""
    serializer, deserialize = kind(SchemaRegistryClient.new_client({"url": "mock://"}))
    outbox = Outbox(serializer=serializer)
    with psycopg.connect(of_bytes.dsn.get_secret_value()) as connection:
        outbox.emit(connection, Event(topic="t", key="k", value=value))
        outbox.emit(connection, Event(topic="t", key="k", value=None))
        with pytest.raises(InvalidEvent) as caught:
            outbox.emit(connection, Event(topic="t", key="k", value=wrong))
    assert caught.value.field == "value"
    [found, tombstone] = [value for (value,) in query(of_bytes, "SELECT kafka_value FROM outbox ORDER BY id")]
    assert (found[:1], tombstone) == (b"\x00", None)
    assert deserialize(found, SerializationContext("t", MessageField.VALUE)) == read
