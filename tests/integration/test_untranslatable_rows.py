"""A text that cannot be written in UTF-8, in a database of another encoding, harms its own row only."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg import sql

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.adapters.postgres_marked_store import PostgresMarkedStore
from outbox_plugin.core.delivery_options import BadRows, Delivery
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.core.shards import Layout
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import backlog, by_key, consume, insert
from tests.support import eventually

pytestmark = pytest.mark.integration

# The columns of a row whose key is `k`, as expressions of SQL, but for the one that is bad.
COLUMNS = {"kafka_key": "'k'", "kafka_value": "'bad'", "kafka_header_keys": "'{h}'", "kafka_header_values": "'{v}'"}
BAD = {
    "value": {"kafka_value": "'bad-' || {bad}"},
    "header": {"kafka_header_values": "ARRAY['v' || {bad}]"},
    "compressed header": {"kafka_header_values": "ARRAY[repeat('v', 10000) || {bad}]"},
    "key": {"kafka_key": "'k' || {bad}"},
    "topic": {"kafka_topic": "'t' || {bad}"},
}


@pytest.fixture(params=["SQL_ASCII", "WIN1252"])
def elsewhere(settings: Settings, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """The outbox in a database of another encoding."""
    name, dsn = f"encoded_{uuid.uuid4().hex[:12]}", settings.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as connection:
        made = "CREATE DATABASE {} ENCODING {} TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        connection.execute(sql.SQL(made).format(sql.Identifier(name), sql.Literal(request.param)))
    there = settings.model_copy(update={"dsn": type(settings.dsn)(f"{dsn.rpartition('/')[0]}/{name}")})
    migrate(there)
    yield there
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def insert_bad(settings: Settings, topic: str, bad: str) -> None:
    """A row with the byte 0x81 in one of its columns, which neither UTF-8 nor Windows-1252 has."""
    columns = {"kafka_topic": f"'{topic}'", **COLUMNS, **BAD[bad]}
    byte = "convert_from('\\x81', current_setting('server_encoding'))"
    values = ", ".join(columns.values()).replace("{bad}", byte)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(f"INSERT INTO outbox ({', '.join(columns)}) VALUES ({values})".encode())


@pytest.mark.parametrize("bad_rows", ["park", "dead-letter"])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("bad", BAD)
def test_a_text_that_cannot_be_written_in_utf_8_harms_its_own_row_only(
    elsewhere: Settings, topic: str, bad: str, delivery: Delivery, bad_rows: BadRows
) -> None:
    settings = elsewhere.model_copy(update={"delivery": delivery, "bad_rows": bad_rows})
    migrate(settings)
    insert(settings, topic, [("other", "1"), ("k", "1")])
    insert_bad(settings, topic, bad)
    insert(settings, topic, [("other", "2"), ("k", "2")])
    key_waits = bad == "value" or ("header" in bad and bad_rows == "park")  # No dead letter can hold the value.
    with Harvester(settings):
        eventually(lambda: backlog(settings) == (2 if key_waits else 0), 60)
        insert(settings, topic, [("other", "3")])
        eventually(lambda: backlog(settings) == (2 if key_waits else 0), 60)
    assert by_key(consume(settings, topic)) == {"other": ["1", "2", "3"], "k": ["1"] if key_waits else ["1", "2"]}
    parked, letters = operate.parked_keys(settings), operate.dead_letters(settings)
    assert ([each.key for each in parked], len(letters)) == ((["k"], 0) if key_waits else ([], 1))
    assert key_waits or letters[0].key == {"key": "k\\x81"}.get(bad, "k")
    assert "cannot be written in UTF-8" in (parked[0].reason if key_waits else letters[0].reason)


def test_a_bad_key_is_found_behind_rows_that_are_marked_and_not_delivered_yet(elsewhere: Settings, topic: str) -> None:
    insert(elsewhere, topic, [("other", "1"), ("other", "2"), ("other", "3")])
    insert_bad(elsewhere, topic, "key")
    insert(elsewhere, topic, [("other", "4")])
    leader_id = str(uuid.uuid4())
    with closing(PostgresMarkedStore(elsewhere, 0, Layout(1, 1))) as store:
        store.lead(leader_id)
        marked = [[row.value for row in store.mark(leader_id, ReadRequest(limit=3))] for _ in range(3)]
    assert marked == [["1", "2", "3"], ["4"], []]
    assert [letter.key for letter in operate.dead_letters(elsewhere)] == ["k\\x81"]
