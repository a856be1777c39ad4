"""What is written with plain SQL arrives, as it was written, if and only if its transaction committed."""

from __future__ import annotations

import random
import threading
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql

from outbox_plugin import Event, Harvester, Outbox, Settings
from outbox_plugin.operate.replay import replay
from outbox_plugin.relay.events import HarvestEvent, TermFinished
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.schema.whole_records import COLUMNS
from outbox_plugin.status.reader import read_status
from tests.harvesting import Record, backlog, by_key, consume, create_topic, drained, insert, insert_numbered
from tests.support import eventually

pytestmark = pytest.mark.integration

GOHARVEST_TABLE = """
CREATE TABLE outbox (
  id                  BIGSERIAL PRIMARY KEY,
  create_time         TIMESTAMP WITH TIME ZONE NOT NULL,
  kafka_topic         VARCHAR(249) NOT NULL,
  kafka_key           VARCHAR(100) NOT NULL,
  kafka_value         VARCHAR(10000),
  kafka_header_keys   TEXT[] NOT NULL,
  kafka_header_values TEXT[] NOT NULL,
  leader_id           UUID
)
"""


def relayed(settings: Settings, topic: str) -> list[Record]:
    """Run a harvester until the outbox is empty; what a consumer then sees."""
    with Harvester(settings):
        drained(settings)
    return consume(settings, topic)


def test_a_row_arrives_with_its_headers(settings: Settings, topic: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
            "VALUES (%s, 'k', 'grüße', ARRAY['a', 'b', 'a'], ARRAY['1', 'ü', ''])",
            (topic,),
        )
    [record] = relayed(settings, topic)
    assert (record.key, record.value, record.headers) == ("k", "grüße", [("a", "1"), ("b", "ü"), ("a", "")])


def test_an_observer_that_fails_ends_no_term(settings: Settings, topic: str) -> None:
    events: list[HarvestEvent] = []

    def observe(event: HarvestEvent) -> None:
        events.append(event)
        raise ValueError("mine")

    insert(settings, topic, [("k", "v")])
    with Harvester(settings, observe=observe):
        drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["v"]}
    assert [each.reason for each in events if isinstance(each, TermFinished)] == [None]


def test_null_is_a_tombstone_and_an_empty_value_is_none(settings: Settings, topic: str) -> None:
    insert(settings, topic, [("k", None), ("k", ""), ("", "an empty key is a key")])
    assert by_key(relayed(settings, topic)) == {"k": [None, ""], "": ["an empty key is a key"]}


def test_a_table_of_goharvests_exact_form_is_relayed_and_keeps_its_columns(unmigrated: Settings, group: str) -> None:
    settings, topic = unmigrated, create_topic(unmigrated, f"{group}-events")
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(GOHARVEST_TABLE)
        columns = (
            "SELECT attname, atttypid, atttypmod, attnotnull FROM pg_attribute WHERE attrelid = 'outbox'::regclass"
        )
        before = connection.execute(columns).fetchall()
    migrate(settings)
    insert(settings, topic, [("k", "v"), ("k", None)])
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        Outbox().emit(connection, Event(topic=topic, key="emitted", value={"a": 1}))
    assert by_key(relayed(settings, topic)) == {"k": ["v", None], "emitted": ['{"a":1}']}
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        after = connection.execute(columns).fetchall()
    added = {name: is_required for name, _, _, is_required in after if name in COLUMNS}
    assert [each for each in after if each[0] not in COLUMNS] == before
    assert added == dict.fromkeys(COLUMNS, False)  # Those of whole records, of which other writers need know nothing.


@pytest.mark.parametrize("table", ["shop.outbox_orders", "Shop.OutboxEvent"])
def test_an_outbox_in_a_schema_of_its_own(settings: Settings, topic: str, table: str) -> None:
    """Capitals are part of a name, as in a table that an ORM has made."""
    schema, _ = table.split(".")
    shop = settings.model_copy(update={"table": table, "retention": timedelta(days=1)})
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        connection.commit()
        migrate(shop, wake_up=True)
        insert(shop, topic, [("k", "v")])
        Outbox(table).emit(connection, Event(topic=topic, key="emitted", value={"a": 1}))
    assert by_key(relayed(shop, topic)) == {"k": ["v"], "emitted": ['{"a":1}']}
    assert replay(shop) == 2
    assert read_status(shop).backlog == 2


def test_emitted_events_leave_with_the_callers_transaction_and_only_then(settings: Settings, topic: str) -> None:
    outbox = Outbox()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        outbox.emit(connection, Event(topic=topic, key="k", type="Kept", value="kept"))
        connection.commit()
        outbox.emit(connection, Event(topic=topic, key="k", value="rolled back"))
        connection.rollback()
        with connection.transaction():
            outbox.emit_many(connection, (Event(topic=topic, key="k", value=str(each)) for each in range(3)))
            with connection.transaction(force_rollback=True):
                outbox.emit(connection, Event(topic=topic, key="k", value="rolled back to a savepoint"))
    records = relayed(settings, topic)
    assert by_key(records) == {"k": ["kept", "0", "1", "2"]}
    assert len({dict(record.headers)["idempotency-key"] for record in records}) == 4
    assert dict(records[0].headers)["event-type"] == "Kept"


@pytest.mark.parametrize(
    ("key", "murmur2"), [("21", -973932308), ("foobar", -790332482), ("a-little-bit-long-string", -985981536)]
)
def test_keys_land_where_java_clients_put_them(settings: Settings, group: str, key: str, murmur2: int) -> None:
    """The hashes are those of Kafka's own client, `Utils.murmur2`."""
    topic = create_topic(settings, f"{group}-wide", partitions=7)
    insert(settings, topic, [(key, "v")])
    [record] = relayed(settings, topic)
    assert record.partition == (murmur2 & 0x7FFFFFFF) % 7


def test_a_row_whose_transaction_commits_late_is_late_not_lost(settings: Settings, topic: str) -> None:
    with Harvester(settings), psycopg.connect(settings.dsn.get_secret_value()) as late:
        late.execute("INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, 'late', '1')", (topic,))
        insert_numbered(settings, topic, 1, 2_000)
        drained(settings)
        assert "late" not in by_key(consume(settings, topic))
        late.commit()
        drained(settings)
    records = by_key(consume(settings, topic))
    assert records.pop("late") == ["1"]
    assert sum(len(values) for values in records.values()) == 2_000


def test_concurrent_writers_with_rollbacks(settings: Settings, topic: str) -> None:
    """Promises 1 to 4: each writer's commits arrive, once, in its order; its rollbacks never do."""
    committed: dict[str, list[str | None]] = {}

    def write(writer: int) -> None:
        chance = random.Random(writer)
        values = committed.setdefault(f"writer-{writer}", [])
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            for number in range(150):
                batch = [str(number * 10 + each) for each in range(chance.randint(1, 4))]
                for value in batch:
                    connection.execute(
                        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s)",
                        (topic, f"writer-{writer}", value),
                    )
                if chance.random() < 0.3:
                    connection.rollback()
                else:
                    connection.commit()
                    values.extend(batch)

    with Harvester(settings):
        writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        drained(settings)
    assert by_key(consume(settings, topic)) == committed


def test_a_creation_time_beyond_pythons_reach_harms_nothing(settings: Settings, topic: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        for time in ("infinity", "-infinity", "4713-01-01 BC", "now"):
            connection.execute(
                "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, 'k', %s)",
                (time, topic, time),
            )
    assert by_key(relayed(settings, topic)) == {"k": ["infinity", "-infinity", "4713-01-01 BC", "now"]}


def test_starting_and_stopping_is_safe_in_any_order(settings: Settings) -> None:
    never_started = Harvester(settings)
    never_started.stop()
    never_started.stop()
    harvester = Harvester(settings)
    harvester.start()
    harvester.start()
    harvester.stop()
    harvester.stop()
    assert not harvester.alive
    assert not [each for each in threading.enumerate() if each.name.startswith("outbox-")]


def test_two_harvesters_relay_each_row_once(settings: Settings, topic: str) -> None:
    with Harvester(settings), Harvester(settings):
        insert_numbered(settings, topic, 1, 20_000)
        eventually(lambda: backlog(settings) == 0, 60)
    values = [int(record.value or 0) for record in consume(settings, topic)]
    assert sorted(values) == list(range(1, 20_001))


FOR_INBOXES = {
    "linger.ms": "3000",
    "fetch.min.bytes": "1000000",
    "fetch.wait.max.ms": "4000",
    "enable.partition.eof": "false",
    "auto.offset.reset": "latest",
    "partition.assignment.strategy": "range",
    "group.instance.id": "the-same-for-all",
}


def test_properties_that_are_meant_for_an_inbox_do_not_stop_a_harvester(settings: Settings, topic: str) -> None:
    """Progress is read to its end, heartbeats are neither sent nor heard late, and each harvester is a member."""
    tuned = settings.model_copy(update={"kafka": FOR_INBOXES})
    for number in range(2):  # The second one finds a progress record.
        insert(settings, topic, [("k", str(number))])
        with Harvester(tuned):
            drained(settings)
            eventually(lambda: read_status(tuned).shards[0].leader is not None, 30)
    assert by_key(consume(settings, topic)) == {"k": ["0", "1"]}
