"""Whole Kafka records: what goes in comes out, through real servers, in both deliveries; what is bad harms itself."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, NamedTuple

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from psycopg.rows import dict_row, scalar_row

from outbox_plugin import Event, Harvester, Outbox, Settings, operate
from outbox_plugin.emit.row_encoder import as_bytes
from outbox_plugin.errors import SchemaMissing
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.schema.migrate import migrate
from tests.emit_connections import DRIVERS, Driver, awaited
from tests.harvesting import backlog, create_topic, drained
from tests.inbox_support import query
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

PARTITIONS = 3
NO_TEXT = b"\x00\xff\x80"
AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
ODD_ZONE = timezone(timedelta(hours=1, seconds=30, microseconds=5))  # Postgres knows no such offset.
OURS = {"idempotency-key", "occurred-at"}
EITHER = pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
INSERT_WHOLE = (
    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_header_keys, kafka_header_values, kafka_header_bytes,"
    " kafka_value_bytes, kafka_partition, kafka_timestamp) VALUES (%s, %s, '{outbox-record}', '{}', '{}', %s, %s, %s)"
)


class Sent(NamedTuple):
    """A record as Kafka has it; the headers without those that every event has."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    partition: int
    timestamp: int


def records(settings: Settings, topic: str) -> list[Sent]:
    """All committed records of `topic`, by partition and offset."""
    config: dict[str, Any] = {
        "bootstrap.servers": settings.bootstrap_servers,
        "group.id": f"{uuid.uuid4()}",
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    found: list[Any] = []
    deadline = time.monotonic() + 60 * PATIENCE
    with closing(Consumer(config)) as consumer:
        unread = set(consumer.list_topics(topic, timeout=20).topics[topic].partitions)
        consumer.subscribe([topic])
        while unread:
            assert time.monotonic() < deadline
            for message in consumer.consume(10_000, 0.2):
                if (error := message.error()) is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    unread.discard(message.partition())
                elif not error.retriable():
                    raise KafkaException(error)
    found.sort(key=lambda each: (each.partition(), each.offset()))
    return [
        Sent(
            each.key(),
            each.value(),
            [header for header in each.headers() or [] if header[0] not in OURS],
            each.partition(),
            each.timestamp()[1],
        )
        for each in found
    ]


def emit(settings: Settings, *events: Event, outbox: Outbox | None = None) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        (outbox or Outbox()).emit_many(connection, events)


@pytest.fixture
def either(settings: Settings, delivery: str) -> Settings:
    return settings.model_copy(update={"delivery": delivery})


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
bodies = texts | st.binary(max_size=40) | st.sampled_from([NO_TEXT, b"\xff" * 60, b"", b"1", "1"])
events = st.builds(
    Event,
    topic=st.just("t"),
    key=bodies,
    value=st.none() | bodies,
    headers=st.lists(st.tuples(st.text("ab", min_size=1, max_size=2), st.none() | bodies), max_size=4),
    partition=st.none() | st.integers(0, PARTITIONS - 1),
    timestamp=st.none()
    | st.datetimes(datetime(1971, 1, 1), datetime(2025, 1, 1), timezones=st.sampled_from([UTC, ODD_ZONE])),
)


def as_bytes_of(body: str | bytes | None) -> bytes | None:
    return body.encode() if isinstance(body, str) else body


def expected(event: Event) -> tuple[Any, ...]:
    headers = event.headers.items() if isinstance(event.headers, dict) else event.headers
    return (
        as_bytes_of(event.key),
        as_bytes_of(event.value),
        [(name, as_bytes_of(body)) for name, body in headers],
    )


@EITHER
def test_any_record_comes_out_as_it_went_in(either: Settings, group: str) -> None:
    emitted: list[Event] = []

    @hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(several=st.lists(events, min_size=1, max_size=8))
    def write(several: list[Event]) -> None:
        numbered = [
            each.model_copy(update={"topic": topic, "headers": (*each.headers, ("n", str(len(emitted) + place)))})
            for place, each in enumerate(several)
        ]
        emit(either, *numbered)
        emitted.extend(numbered)

    topic = create_topic(either, f"{group}-any", PARTITIONS)
    write()
    began = time.time() * 1000
    with Harvester(either):
        drained(either)
    found = {int(dict(each.headers)["n"] or b""): each for each in records(either, topic)}
    assert len(found) == len(emitted) > 100
    for number, event in enumerate(emitted):
        sent = found[number]
        assert (sent.key, sent.value, sent.headers) == expected(event)
        assert event.partition in (None, sent.partition)
        if event.timestamp is None:
            assert sent.timestamp > began - 60_000
        else:
            assert sent.timestamp == (event.timestamp - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    for key in {as_bytes_of(event.key) for event in emitted}:
        of_key = [n for n, event in enumerate(emitted) if as_bytes_of(event.key) == key and event.partition is None]
        assert len({found[n].partition for n in of_key}) <= 1


@EITHER
def test_a_key_keeps_its_order_in_whichever_form_its_events_are(either: Settings, topic: str) -> None:
    keys: list[str | bytes] = ["k", b"k", NO_TEXT, b"l"]
    emit(
        either,
        *(
            Event(topic=topic, key=keys[number % 4], value=str(number) if number % 3 else NO_TEXT + b"%d" % number)
            for number in range(400)
        ),
    )
    with Harvester(either):
        drained(either)
    for key in (b"k", NO_TEXT, b"l"):
        numbers = [int((each.value or b"").removeprefix(NO_TEXT)) for each in records(either, topic) if each.key == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == (200 if key == b"k" else 100)


@EITHER
def test_a_row_without_a_timestamp_has_the_time_of_its_publication(either: Settings, topic: str) -> None:
    emit(either, Event(topic=topic, key=NO_TEXT, value=None), Event(topic=topic, key="k", value=None))
    query(either, "UPDATE outbox SET create_time = '2020-01-01' RETURNING id")
    began = time.time() * 1000
    with Harvester(either):
        drained(either)
    assert all(each.timestamp >= began - 1_000 for each in records(either, topic))


@EITHER
def test_a_partition_that_a_topic_does_not_have_harms_its_key_alone(either: Settings, topic: str) -> None:
    emit(
        either,
        Event(topic=topic, key="good", value="1"),
        Event(topic=topic, key=NO_TEXT, value="bad", partition=PARTITIONS),
        Event(topic=topic, key=NO_TEXT, value="behind"),
        Event(topic=topic, key="good", value="2"),
    )
    with Harvester(either):
        eventually(lambda: operate.parked_keys(either), 30)
        emit(either, Event(topic=topic, key="good", value="3"))
        eventually(lambda: backlog(either) == 2, 30)
        [parked_key] = operate.parked_keys(either)
        assert parked_key.reason == f"topic {topic}: it has 3 partition(s), and no partition 3"
        assert [each.value for each in records(either, topic)] == [b"1", b"2", b"3"]
        admin = AdminClient({"bootstrap.servers": either.bootstrap_servers})
        admin.create_partitions([NewPartitions(topic, PARTITIONS + 1)])[topic].result(20 * PATIENCE)
        operate.release(either)
        drained(either)
    found = records(either, topic)
    assert [each.value for each in found if each.partition == PARTITIONS and each.value == b"bad"] == [b"bad"]
    assert [each.value for each in found if each.value == b"behind"] == [b"behind"]


@EITHER
@pytest.mark.parametrize("count", [1, 2])  # librdkafka reports a single one for all records of its batch.
def test_a_timestamp_that_the_broker_refuses_harms_its_key_alone(either: Settings, topic: str, count: int) -> None:
    settings = either.model_copy(update={"bad_rows": "dead-letter"})
    late = datetime.now(UTC) + timedelta(days=1_000)
    good = [Event(topic=topic, key=f"k{number % 5}", value=str(number)) for number in range(50)]
    bad = [Event(topic=topic, key=NO_TEXT, value=f"bad {number}", timestamp=late) for number in range(count)]
    old = [Event(topic=topic, key=f"old {number}", value=f"old {number}", timestamp=AT) for number in range(20)]
    emit(settings, *good[:25], *old[:10], *bad, *old[10:], *good[25:])
    with Harvester(settings):
        drained(settings)
    found = [each.value for each in records(settings, topic)]
    assert sorted(value or b"" for value in found) == sorted(str(each.value).encode() for each in [*good, *old])
    letters = operate.dead_letters(settings)
    assert [letter.reason.startswith(f"its timestamp, {late:%Y-%m-%dT%H}") for letter in letters] == [True] * count


@EITHER
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("kafka_header_keys = '{}'", "does not begin with 'outbox-record'"),
        ("kafka_header_bytes = NULL", "kafka_header_bytes is NULL"),
        ("kafka_header_values = '{a}'", "kafka_header_values must be empty"),
        ("kafka_header_bytes = '{a}'", "0 header keys, but 1 header values"),
        ("kafka_partition = -1", "kafka_partition is -1"),
        ("kafka_timestamp = 'infinity'", "kafka_timestamp is not a time"),
        ("kafka_timestamp = '1970-01-01 00:00:00+00'", "kafka_timestamp is not a time"),
    ],
)
def test_columns_that_hold_no_record_make_a_bad_row(either: Settings, topic: str, change: str, reason: str) -> None:
    query(either, f"{INSERT_WHOLE} RETURNING id", topic, "k", NO_TEXT, 1, AT)
    query(either, f"UPDATE outbox SET {change} RETURNING id")
    emit(either, Event(topic=topic, key="good", value="1"))
    with Harvester(either):
        eventually(lambda: operate.parked_keys(either), 30)
        [parked_key] = operate.parked_keys(either)
        eventually(lambda: backlog(either) == 1, 30)
    assert reason in parked_key.reason
    assert [each.key for each in records(either, topic)] == [b"good"]


@EITHER
def test_a_dead_letter_is_kept_and_retried_as_it_was(either: Settings, topic: str) -> None:
    settings = either.model_copy(update={"bad_rows": "dead-letter"})
    headers = (("a", NO_TEXT), ("a", None))
    emit(settings, Event(topic=topic, key=NO_TEXT, value=b"\xff", headers=headers, partition=7, timestamp=AT))
    with Harvester(settings):
        eventually(lambda: operate.dead_letters(settings), 30)
        assert query(settings, "SELECT kafka_partition FROM outbox_dead_letter") == [(7,)]
        query(settings, "UPDATE outbox_dead_letter SET kafka_partition = 2 RETURNING id")
        assert operate.retry_dead_letters(settings) == 1
        drained(settings)
    [sent] = records(settings, topic)
    assert sent == Sent(NO_TEXT, b"\xff", list(headers), 2, int(AT.timestamp() * 1000))


@pytest.mark.parametrize("ids", [True, False])
def test_a_dead_letter_stays_where_the_table_has_lost_the_columns_for_it(
    settings: Settings, topic: str, ids: bool
) -> None:
    of_letters = settings.model_copy(update={"bad_rows": "dead-letter"})
    emit(of_letters, Event(topic=topic, key=NO_TEXT, value=b"\xff", partition=7))
    with Harvester(of_letters):
        eventually(lambda: operate.dead_letters(of_letters), 30)
    query(settings, "ALTER TABLE outbox ALTER COLUMN kafka_partition TYPE BIGINT; SELECT 1")
    [letter] = operate.dead_letters(settings)
    if ids:
        with pytest.raises(operate.DeadLetterAltered, match="whole record, and the table lacks the columns for it"):
            operate.retry_dead_letters(settings, [letter.id])
    else:
        assert operate.retry_dead_letters(settings) == 0
    assert query(settings, "SELECT kafka_key_bytes, kafka_value_bytes FROM outbox_dead_letter") == [(NO_TEXT, b"\xff")]
    assert backlog(settings) == 0


@EITHER
def test_what_is_kept_is_replayed_as_it_was(either: Settings, topic: str) -> None:
    kept = either.model_copy(update={"retention": timedelta(days=1)})
    headers = (("a", NO_TEXT), ("a", None))
    emit(
        kept,
        Event(topic=topic, key=NO_TEXT, value=b"\xff", headers=headers, partition=2, timestamp=AT),
        Event(topic=topic, key="k", value="text", partition=1),
        Event(topic=topic, key="k", value="plain"),
    )
    with Harvester(kept):
        drained(kept)
        assert operate.replay(kept) == 3
        drained(kept)
    found = records(kept, topic)
    first = [each for each in found if "outbox-replay" not in dict(each.headers)]
    again = [each for each in found if "outbox-replay" in dict(each.headers)]

    def beside_replay(sent: Sent) -> Any:
        return sent._replace(headers=[each for each in sent.headers if each[0] != "outbox-replay"], timestamp=0)

    assert [beside_replay(each) for each in first] == [beside_replay(each) for each in again]
    assert len(again) == 3
    [whole] = [each for each in again if each.key == NO_TEXT]
    assert whole == Sent(NO_TEXT, b"\xff", [*headers, ("outbox-replay", b"1")], 2, int(AT.timestamp() * 1000))


def test_a_table_of_bytes_holds_its_values_beside_a_key_of_bytes(unmigrated: Settings, group: str) -> None:
    query(
        unmigrated,
        "CREATE TABLE outbox (id BIGSERIAL PRIMARY KEY, create_time TIMESTAMPTZ NOT NULL DEFAULT now(),"
        " kafka_topic VARCHAR(249) NOT NULL, kafka_key VARCHAR(100) NOT NULL, kafka_value BYTEA,"
        " kafka_header_keys TEXT[] NOT NULL, kafka_header_values TEXT[] NOT NULL, leader_id UUID); SELECT 1",
    )
    migrate(unmigrated)
    topic = create_topic(unmigrated, f"{group}-bytes")
    emit(unmigrated, Event(topic=topic, key=NO_TEXT, value=b"\xff"), outbox=Outbox(serializer=as_bytes))
    assert query(unmigrated, "SELECT kafka_value, kafka_value_bytes FROM outbox") == [(b"\xff", None)]
    with Harvester(unmigrated):
        drained(unmigrated)
    assert [(each.key, each.value) for each in records(unmigrated, topic)] == [(NO_TEXT, b"\xff")]


@pytest.mark.parametrize("key", ["text", NO_TEXT])
@pytest.mark.parametrize("count", [1, 2])
def test_tombstones_go_into_a_table_of_bytes(unmigrated: Settings, key: str | bytes, count: int) -> None:
    query(unmigrated, "CREATE TABLE outbox (id BIGSERIAL PRIMARY KEY, kafka_value BYTEA); SELECT 1")
    query(
        unmigrated,
        "ALTER TABLE outbox ADD create_time TIMESTAMPTZ NOT NULL DEFAULT now(), ADD kafka_topic TEXT NOT NULL,"
        " ADD kafka_key TEXT NOT NULL, ADD kafka_header_keys TEXT[] NOT NULL, ADD kafka_header_values TEXT[] NOT NULL,"
        " ADD leader_id UUID; SELECT 1",
    )
    migrate(unmigrated)
    emit(unmigrated, *(Event(topic="t", key=key, value=None) for _ in range(count)), outbox=Outbox(serializer=as_bytes))
    assert query(unmigrated, "SELECT kafka_value, kafka_value_bytes FROM outbox") == [(None, None)] * count


@pytest.mark.parametrize("row_factory", [dict_row, scalar_row])
def test_whole_records_are_emitted_whatever_the_connection_makes_of_rows(settings: Settings, row_factory: Any) -> None:
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn, row_factory=row_factory) as connection:
        Outbox().emit(connection, ALL_KINDS[0])
    query(settings, "ALTER TABLE outbox DROP COLUMN kafka_partition; SELECT 1")
    with psycopg.connect(dsn, row_factory=row_factory) as connection:
        with pytest.raises(SchemaMissing, match="run `outbox migrate`"):
            Outbox().emit(connection, ALL_KINDS[0])
        Outbox().emit(connection, ALL_KINDS[1])
    assert query(settings, "SELECT count(*) FROM outbox") == [(2,)]


@pytest.fixture(params=DRIVERS, ids=[each.name for each in DRIVERS])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # Scenarios are coroutines, for all drivers alike.
    found: Driver = request.param
    return found


ALL_KINDS = [
    Event(topic="t", key=NO_TEXT, value=b"\xff\\'\"{,}", headers=[('a"\\,{}', NO_TEXT), ("a", None), ("b", "é")]),
    Event(topic="t", key="plain", value="plain", headers={"a": "{NULL}"}),
    Event(topic="t", key="k", value="x", partition=2, timestamp=AT),
    Event(topic="t", key=b"\xff" * 60, value=None, headers=[("n", None)]),
    Event(topic="t", key="null header", value=None, headers=[("n", None), ("n", "")]),
]
COLUMNS = (
    "SELECT kafka_key, kafka_value, kafka_header_keys, kafka_header_values, kafka_key_bytes, kafka_value_bytes,"
    " kafka_header_bytes, kafka_partition, kafka_timestamp FROM outbox ORDER BY id"
)


def test_each_driver_writes_the_same_columns(settings: Settings, driver: Driver) -> None:
    async def scenario(driver: Driver, dsn: str) -> None:
        outbox = Outbox()
        async with driver.transaction(dsn) as target:
            await awaited(outbox.emit_many(target, ALL_KINDS))
            for each in ALL_KINDS:
                await awaited(outbox.emit(target, each))

    asyncio.run(scenario(driver, settings.dsn.get_secret_value()))
    written = query(settings, COLUMNS)
    assert written[:5] == written[5:]
    ours = ["idempotency-key", "occurred-at"]
    assert written[0][2] == ["outbox-record", *ours, 'a"\\,{}', "a", "b"]
    assert (written[0][0], written[0][1], written[0][3]) == (f"hex:{NO_TEXT.hex()}", None, [])
    assert written[0][4:6] == (NO_TEXT, b"\xff\\'\"{,}")
    assert written[0][6][2:] == [NO_TEXT, None, "é".encode()]
    assert written[1][:2] == ("plain", "plain")
    assert written[1][4:] == (None,) * 5
    assert (written[2][1], written[2][7:]) == ("x", (2, AT))
    assert (written[3][4], written[3][6][2:]) == (b"\xff" * 60, [None])
    assert (written[4][3][2:], written[4][4:]) == ([None, ""], (None,) * 5)


def test_a_table_without_the_columns_is_told_in_one_line(settings: Settings, driver: Driver) -> None:
    query(settings, "ALTER TABLE outbox DROP COLUMN kafka_partition; SELECT 1")

    async def scenario(driver: Driver, dsn: str) -> None:
        async with driver.transaction(dsn) as target:
            with pytest.raises(SchemaMissing, match="run `outbox migrate`; a view must be made with them") as refused:
                await awaited(Outbox().emit(target, ALL_KINDS[0]))
            assert "\n" not in str(refused.value)
            await awaited(Outbox().emit(target, ALL_KINDS[1]))

    asyncio.run(scenario(driver, settings.dsn.get_secret_value()))
    assert query(settings, "SELECT kafka_key FROM outbox") == [("plain",)]


@EITHER
def test_a_row_whose_table_has_lost_the_columns_is_bad_and_no_tombstone(either: Settings, topic: str) -> None:
    emit(either, Event(topic=topic, key=NO_TEXT, value=b"\xff"), Event(topic=topic, key="good", value="1"))
    query(either, "ALTER TABLE outbox DROP COLUMN kafka_value_bytes; SELECT 1")
    with Harvester(either):
        eventually(lambda: operate.parked_keys(either), 30)
        eventually(lambda: backlog(either) == 1, 30)
        [parked_key] = operate.parked_keys(either)
    assert parked_key.reason.startswith("it is a whole record, and the table lacks the columns for it")
    assert [each.key for each in records(either, topic)] == [b"good"]


@EITHER
def test_a_harvester_notices_that_the_outbox_is_migrated_while_it_leads(either: Settings, topic: str) -> None:
    query(either, "ALTER TABLE outbox RENAME COLUMN kafka_partition TO elsewhere; SELECT 1")
    with Harvester(either):
        emit(either, Event(topic=topic, key="good", value="1"))
        drained(either)
        query(either, "ALTER TABLE outbox RENAME COLUMN elsewhere TO kafka_partition; SELECT 1")
        emit(either, Event(topic=topic, key=NO_TEXT, value=b"\xff", partition=1))
        drained(either)
    assert not operate.parked_keys(either)
    assert [each.value for each in records(either, topic) if each.key == NO_TEXT] == [b"\xff"]


def test_a_harvester_that_does_not_know_the_columns_cannot_make_a_row_a_dead_letter_without_them(
    settings: Settings, topic: str
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        query(
            settings,
            "INSERT INTO outbox_dead_letter (table_name, reason, create_time, kafka_topic, kafka_key,"
            " kafka_header_keys, kafka_header_values) VALUES"
            " ('outbox', 'r', now(), 't', 'k', '{outbox-record,a}', '{}') RETURNING id",
        )


def test_a_handler_sees_what_was_emitted(settings: Settings, topic: str) -> None:
    event = Event(topic=topic, key=NO_TEXT, value=b"\xff", headers=[("a", NO_TEXT), ("a", None)], timestamp=AT)
    emit(settings, event)
    handled: list[Received] = []

    def handle(connection: psycopg.Connection[Any], received: Received) -> None:
        handled.append(received)

    with Harvester(settings), Inbox(settings, group=f"{settings.group}-inbox", topics=[topic], handler=handle):
        eventually(lambda: handled, 60)
    [received] = handled
    assert (received.key, received.value) == (NO_TEXT, b"\xff")
    assert received.headers[2:] == (("a", NO_TEXT), ("a", None))
    assert received.timestamp == int(AT.timestamp() * 1000)


def call(settings: Settings, *values: Any) -> Any:
    return query(
        settings,
        "SELECT outbox_emit_record(%s, %s, %s, header_names => %s, header_values => %s, partition => %s,"
        " record_timestamp => %s)",
        *values,
    )


@EITHER
def test_a_whole_record_from_sql(either: Settings, topic: str) -> None:
    [(key,)] = call(either, topic, NO_TEXT, b"\xff", ["a", "a"], [NO_TEXT, None], 1, AT)
    uuid.UUID(key)
    assert call(either, topic, b"text", None, ["idempotency-key"], [b"mine"], None, None) == [("mine",)]
    query(either, "SELECT outbox_emit_record(%s, %s, %s)", topic, b"k" * 200, b"value")
    emit(either, Event(topic=topic, key=b"k" * 200, value="again"), Event(topic=topic, key="text", value="again"))
    orders = [order for (order,) in query(either, "SELECT kafka_key FROM outbox ORDER BY id")]
    assert (orders[1], orders[2]) == (orders[4], orders[3])
    with Harvester(either):
        drained(either)
    found = records(either, topic)
    assert Sent(NO_TEXT, b"\xff", [("a", NO_TEXT), ("a", None)], 1, int(AT.timestamp() * 1000)) in found
    assert [each.value for each in found if each.key == b"text"] == [None, b"again"]
    assert [each.value for each in found if each.key == b"k" * 200] == [b"value", b"again"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("no spaces", b"k", None, [], [], None, None), "topic: expected"),
        (("__own", b"k", None, [], [], None, None), "topic: names that begin"),
        (("t", None, None, [], [], None, None), "key: expected bytes"),
        (("t", b"k", None, ["a"], [], None, None), "headers: expected two arrays"),
        (("t", b"k", None, [""], [b"1"], None, None), "headers: a header needs a name"),
        (("t", b"k", None, [None], [b"1"], None, None), "headers: a header needs a name"),
        (("t", b"k", None, [], [], -1, None), "partition: expected"),
        (("t", b"k", None, [], [], None, datetime(1969, 1, 1, tzinfo=UTC)), "record_timestamp: expected"),
        (("t", b"k", b"x" * 999_950, [], [], None, None), "value: the record has"),
    ],
)
def test_sql_refuses_what_could_not_be_sent(settings: Settings, values: Sequence[Any], reason: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=reason):
        call(settings, *values)
