"""Rows that nobody means to write, and databases that will not have them aside: each harms itself only."""

from __future__ import annotations

import random
import resource
from typing import Any

import psycopg
import pytest

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.row_faults import fault_of
from outbox_plugin.status.reader import read_status
from tests.harvesting import backlog, by_key, consume, drained, insert
from tests.support import eventually

pytestmark = pytest.mark.integration

ROW = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) VALUES "
REFUSING_TRIGGER = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not here'; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON {} FOR EACH ROW EXECUTE FUNCTION refuse()
"""


def run_sql(settings: Settings, query: str, *values: object) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(query.encode(), values or None)


@pytest.fixture(params=["exactly-once", "at-least-once"])
def either(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    return settings.model_copy(update={"delivery": request.param})


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ("ARRAY[ARRAY['a','b']], ARRAY['x']", "the header keys are an array of arrays"),
        ("ARRAY[ARRAY['a','b']], ARRAY[ARRAY['x','y']]", "the header keys are an array of arrays"),
        ("ARRAY[NULL], ARRAY['x']", "the key of header 1 is NULL"),
        ("ARRAY['a',''], ARRAY['x','y']", "the key of header 2 is empty"),
    ],
)
def test_headers_that_kafka_has_no_form_for_park_their_key(
    either: Settings, topic: str, arrays: str, reason: str
) -> None:
    insert(either, topic, [("good", "1"), ("bad", "1")])
    run_sql(either, f"{ROW} (%s, 'bad', '2', {arrays})", topic)
    insert(either, topic, [("good", "2"), ("bad", "3")])
    with Harvester(either):
        eventually(lambda: backlog(either) == 2, 30)
        [parked_key] = operate.parked_keys(either)
        assert (parked_key.key, parked_key.reason[: len(reason)]) == ("bad", reason)
        run_sql(either, "UPDATE outbox SET kafka_header_keys = '{}', kafka_header_values = '{}'")
        operate.release(either)
        drained(either)
    assert by_key(consume(either, topic)) == {"good": ["1", "2"], "bad": ["1", "2", "3"]}


@pytest.mark.parametrize("column", ["kafka_header_keys", "kafka_header_values", "create_time"])
def test_null_where_an_alter_table_has_let_it_in(either: Settings, topic: str, column: str) -> None:
    if (either.delivery, column) == ("at-least-once", "create_time"):
        pytest.skip("this delivery does not look at create_time")
    insert(either, topic, [("good", "1"), ("bad", "1")])
    with Harvester(either):
        drained(either)
        run_sql(either, f"ALTER TABLE outbox ALTER COLUMN {column} DROP NOT NULL")
        run_sql(either, f"INSERT INTO outbox (kafka_topic, kafka_key, {column}) VALUES (%s, 'bad', NULL)", topic)
        insert(either, topic, [("good", "2"), ("bad", "3")])
        eventually(lambda: operate.parked_keys(either), 30)
        eventually(lambda: backlog(either) == 2, 30)
        assert "NULL" in operate.parked_keys(either)[0].reason
    assert by_key(consume(either, topic)) == {"good": ["1", "2"], "bad": ["1"]}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_row_without_a_key_harms_no_row_that_has_one(either: Settings, topic: str, shards: int) -> None:
    """It has no order, so that nothing need wait for it; the others without a key are as bad as it is."""
    settings = either.model_copy(update={"shards": shards})
    run_sql(settings, "ALTER TABLE outbox ALTER COLUMN kafka_key DROP NOT NULL")
    insert(settings, topic, [("a", "1"), ("b", "1")])
    for value in ("lost", "lost too"):
        run_sql(
            settings, "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, NULL, %s)", topic, value
        )
    run_sql(settings, f"{ROW} (%s, 'bad', '1', '{{a}}', '{{}}')", topic)
    insert(settings, topic, [("a", "2")])
    with Harvester(settings):
        eventually(lambda: len(operate.parked_keys(settings)) == 2, 30)
        insert(settings, topic, [("b", "2")])
        eventually(lambda: backlog(settings) == 3, 30)
        [bad, keyless] = sorted(operate.parked_keys(settings), key=lambda each: each.keyless)
        assert ((bad.key, bad.keyless), (keyless.key, keyless.keyless)) == (("bad", False), (None, True))
        assert (keyless.reason, keyless.ordering_key.description) == ("kafka_key is NULL", "rows without a key")
        run_sql(settings, "UPDATE outbox SET kafka_key = 'found', kafka_header_keys = '{}'")
        operate.release(settings)
        drained(settings)
    found = ["lost", "lost too", "1"]
    assert by_key(consume(settings, topic)) == {"a": ["1", "2"], "b": ["1", "2"], "found": found}


def odd_rows(topic: str, count: int) -> list[OutboxRow]:
    """Rows as Postgres can hold them, each with a key of its own; about half of them are bad."""
    dice = random.Random(20)
    texts = ["", "a", "b'c", '"', "\\", "ä𝄞", "\x1b[31m", "\n", "\x7f", "{}", "NULL", "x" * 300]

    def array() -> list[Any]:
        elements: list[Any] = [dice.choice([*texts, "h", "h", "h", None]) for _ in range(dice.choice([0, 1, 1, 2]))]
        return [elements, [*elements]] if elements and dice.random() < 0.1 else elements

    def row(number: int) -> OutboxRow:
        value = dice.choice([None, *texts])
        return OutboxRow(number, 0, topic, f"{number}{dice.choice(texts[:-1])}", value, array(), array(), 0)

    return [row(number) for number in range(count)]


def test_of_rows_of_every_kind_the_good_ones_arrive_and_the_bad_ones_are_parked(either: Settings, topic: str) -> None:
    rows = odd_rows(topic, 400)
    with psycopg.connect(either.dsn.get_secret_value()) as connection:
        connection.cursor().executemany(
            f"{ROW} (%s, %s, %s, %s::text[], %s::text[])".encode(),
            [(row.topic, row.key, row.value, row.header_keys, row.header_values) for row in rows],
        )
    good = [row for row in rows if fault_of(row) is None]
    assert 50 < len(good) < 350
    with Harvester(either):
        eventually(lambda: backlog(either) == len(rows) - len(good), 60)
        eventually(lambda: len(operate.parked_keys(either)) == len(rows) - len(good), 30)
    arrived = consume(either, topic)
    assert {record.key: record.value for record in arrived} == {row.key: row.value for row in good}
    assert len(arrived) == len(good)
    expected = {row.key: list(zip(row.header_keys, row.header_values, strict=True)) for row in good}
    assert {record.key: record.headers for record in arrived} == {
        key: [(name, text or "") for name, text in headers] for key, headers in expected.items()
    }


@pytest.mark.parametrize("refusing", ["CHECK (kafka_key <> 'bad')", "a trigger", "no table"])
def test_a_row_that_cannot_become_a_dead_letter_is_parked(either: Settings, topic: str, refusing: str) -> None:
    settings = either.model_copy(update={"bad_rows": "dead-letter"})
    run_sql(
        settings,
        {"a trigger": REFUSING_TRIGGER.format("outbox_dead_letter"), "no table": "DROP TABLE outbox_dead_letter"}.get(
            refusing, f"ALTER TABLE outbox_dead_letter ADD CONSTRAINT refused {refusing}"
        ),
    )
    insert(settings, topic, [("good", "1"), ("bad", "1")])
    run_sql(settings, f"{ROW} (%s, 'bad', '2', '{{a}}', '{{}}'), (%s, 'worse', '1', '{{a}}', '{{}}')", topic, topic)
    insert(settings, topic, [("good", "2"), ("bad", "3")])
    with Harvester(settings):
        eventually(lambda: backlog(settings) == (2 if "CHECK" in refusing else 3), 30)
        parked_key = operate.parked_keys(settings)[0]
        assert parked_key.key == "bad"
        assert parked_key.reason.startswith(
            "1 header keys, but 0 header values; the database refuses to make it a dead letter"
        )
    assert by_key(consume(settings, topic)) == {"good": ["1", "2"], "bad": ["1"]}


def test_a_row_that_can_be_put_nowhere_holds_only_its_key_back(either: Settings, topic: str) -> None:
    """Neither dead letters nor parked keys may be written: the key waits in the leader alone, and is tried again."""
    settings = either.model_copy(update={"bad_rows": "dead-letter"})
    run_sql(settings, "ALTER TABLE outbox_dead_letter ADD CONSTRAINT refused CHECK (false)")
    run_sql(settings, "ALTER TABLE outbox_parked ADD CONSTRAINT refused CHECK (false)")
    insert(settings, topic, [("good", "1"), ("bad", "1")])
    run_sql(settings, f"{ROW} (%s, 'bad', '2', '{{a}}', '{{}}')", topic)
    insert(settings, topic, [("bad", "3"), ("good", "2")])
    with Harvester(settings):
        eventually(lambda: by_key(consume(settings, topic)).get("good") == ["1", "2"], 30)
        insert(settings, topic, [("good", "3")])
        eventually(lambda: backlog(settings) <= 3, 30)
        eventually(lambda: "key bad is held back" in (read_status(settings).shards[0].trouble or ""), 30)
        run_sql(settings, "UPDATE outbox SET kafka_header_keys = '{}'")
        drained(settings, 30)
    assert by_key(consume(settings, topic)) == {"good": ["1", "2", "3"], "bad": ["1", "2", "3"]}


def test_a_value_that_no_record_can_hold_is_not_read(either: Settings, topic: str) -> None:
    """Before it is refused, it is only measured: it may be larger than the harvester's memory."""
    insert(either, topic, [("good", "1"), ("bad", "1")])
    run_sql(either, f"{ROW} (%s, 'bad', repeat('x', 250000000), '{{}}', '{{}}')", topic)
    insert(either, topic, [("bad", "3"), ("good", None), ("good", "x" * 900_000)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Harvester(either):
        eventually(lambda: backlog(either) == 2, 60)
        [parked_key] = operate.parked_keys(either)
        assert (parked_key.key, parked_key.reason) == (
            "bad",
            "the value has 250,000,000 bytes; larger than the client's message.max.bytes of 1,000,000",
        )
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KiB.
        run_sql(either, "UPDATE outbox SET kafka_value = '2' WHERE length(kafka_value) > 1000000")
        operate.release(either)
        drained(either)
    assert by_key(consume(either, topic)) == {"good": ["1", None, "x" * 900_000], "bad": ["1", "2", "3"]}


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["EXTENDED", "EXTERNAL"])
def test_headers_that_no_record_can_hold_are_not_read(either: Settings, topic: str, storage: str) -> None:
    """Compressed in the database or as they are: they are measured before they are read, as values are."""
    for column in ("kafka_header_keys", "kafka_header_values"):
        run_sql(either, f"ALTER TABLE outbox ALTER COLUMN {column} SET STORAGE {storage}")
    insert(either, topic, [("good", "1"), ("bad", "1")])
    headers = "ARRAY['h'], ARRAY[repeat('x', 250000000)]"
    run_sql(either, f"{ROW} (%s, 'bad', '2', {headers}), (%s, 'worse', '1', {headers})", topic, topic)
    insert(either, topic, [("bad", "3"), ("good", "2")])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Harvester(either):
        eventually(lambda: backlog(either) == 3, 60)
        parked_keys = {parked_key.key: parked_key.reason for parked_key in operate.parked_keys(either)}
        assert parked_keys.keys() == {"bad", "worse"}
        assert all("the headers have 250,000" in reason for reason in parked_keys.values())
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KiB.
        run_sql(either, "UPDATE outbox SET kafka_header_values = '{x}' WHERE kafka_header_keys = '{h}'")
        operate.release(either)
        drained(either)
    assert by_key(consume(either, topic)) == {"good": ["1", "2"], "bad": ["1", "2", "3"], "worse": ["1"]}
