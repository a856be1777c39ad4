"""Who may create functions and operators where the outbox lives gets none of them run by us."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession

from outbox_plugin import Event, Harvester, Outbox, Settings, operate
from outbox_plugin.errors import ServerRefused
from outbox_plugin.inbox import Inbox, Received, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from outbox_plugin.inbox.retention import Retention, clean
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.schema.orphaned_staging_tables import drop_orphans
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.publish import Staged, publish_events
from outbox_plugin.spark.staging import Attempt
from outbox_plugin.status.reader import read_status
from tests.harvesting import consume, drained, insert
from tests.hostile_role import ROLE, calls, plant
from tests.inbox_support import effects, make_effect_table, produce, record_effect
from tests.spark_support import new_staging_table
from tests.support import eventually

pytestmark = pytest.mark.integration

GOHARVEST = """
CREATE TABLE outbox (
    id BIGSERIAL PRIMARY KEY, create_time TIMESTAMP WITH TIME ZONE NOT NULL, kafka_topic VARCHAR(249) NOT NULL,
    kafka_key VARCHAR(100) NOT NULL, kafka_value VARCHAR(10000), kafka_header_keys TEXT[] NOT NULL,
    kafka_header_values TEXT[] NOT NULL, leader_id UUID
)
"""


@pytest.fixture
def hostile(unmigrated: Settings) -> Iterator[Settings]:
    """An outbox of goharvest's form, and beside it what a hostile role has planted; its user looks there first."""
    dsn = unmigrated.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(GOHARVEST)
        connection.execute(f"CREATE ROLE {ROLE}; GRANT CREATE ON SCHEMA public TO {ROLE}")
    theirs = make_conninfo(dsn, options="-c search_path=public,pg_catalog")
    try:
        migrate(unmigrated)
        make_effect_table(unmigrated)
        assert plant(dsn) > 500
        yield Settings(**{**unmigrated.model_dump(), "dsn": theirs, "shards": 2, "retention": timedelta(days=1)})
        assert calls(dsn) == 0
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"DROP OWNED BY {ROLE} CASCADE; DROP ROLE {ROLE}")


def test_migrate_runs_nothing_of_it(hostile: Settings) -> None:
    """Neither anew nor again, nor when it makes an outbox beside the first."""
    migrate(hostile, wake_up=True)
    migrate(hostile)
    migrate(Settings(**{**hostile.model_dump(), "table": "another", "group": "another"}))


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_harvest_status_and_orders_run_nothing_of_it(
    hostile: Settings, unmigrated: Settings, topic: str, delivery: str
) -> None:
    settings = Settings(**{**hostile.model_dump(), "delivery": delivery})
    migrate(settings, wake_up=True)
    insert(unmigrated, topic, [("a", "1"), ("b", "x" * 9_000), ("bad", "1"), ("a", "2")])
    with psycopg.connect(unmigrated.dsn.get_secret_value()) as connection:
        connection.execute("UPDATE outbox SET kafka_header_keys = '{a,b}' WHERE kafka_key OPERATOR(pg_catalog.=) 'bad'")
    with Harvester(settings):
        eventually(lambda: read_status(settings).parked_keys == 1, 60)
        operate.pause(settings, 0)
        operate.resume(settings, 0)
        with psycopg.connect(unmigrated.dsn.get_secret_value()) as connection:
            connection.execute(
                "UPDATE outbox SET kafka_header_keys = '{}' WHERE kafka_key OPERATOR(pg_catalog.=) 'bad'"
            )
        operate.release(settings)
        drained(unmigrated)
        assert operate.replay(settings) == 4
        drained(unmigrated)
    assert len(consume(unmigrated, topic)) >= 4
    assert operate.dead_letters(settings) == []
    assert operate.retry_dead_letters(settings) == operate.discard_dead_letters(settings) == 0


def test_dead_letters_run_nothing_of_it(hostile: Settings, unmigrated: Settings, topic: str) -> None:
    settings = Settings(**{**hostile.model_dump(), "bad_rows": "dead-letter"})
    insert(unmigrated, topic, [("bad", "1")])
    with psycopg.connect(unmigrated.dsn.get_secret_value()) as connection:
        connection.execute("UPDATE outbox SET kafka_header_keys = '{a,b}'")
    with Harvester(settings):
        eventually(lambda: read_status(settings).dead_letters == 1, 60)
        operate.retry_dead_letters(settings)
        eventually(lambda: read_status(settings).dead_letters == 1, 60)
    assert operate.discard_dead_letters(settings) == 1


def test_emitting_runs_nothing_of_it(hostile: Settings, unmigrated: Settings, topic: str) -> None:
    migrate(hostile, wake_up=True)
    with psycopg.connect(hostile.dsn.get_secret_value()) as connection:
        events = [Event(topic=topic, key=f"k{number}", value=number) for number in range(3)]
        Outbox().emit(connection, events[0])
        Outbox().emit_many(connection, events[1:])
        emit = "SELECT outbox_emit('t'::pg_catalog.text, 'k'::pg_catalog.text, '{}'::pg_catalog.jsonb)"
        connection.execute(emit)
        Outbox().emit(connection, Event(topic=topic, key=b"\xff", value=b"\xff", partition=0, headers=[("a", b"\xff")]))
        record = "SELECT outbox_emit_record(%s::pg_catalog.text, %s::pg_catalog.bytea, '\\xff'::pg_catalog.bytea)"
        connection.execute(record, ("t", b"\xff" * 60))
        connection.execute(record, ("t", b"k"))
        for refused in (("t!", b"k"), ("t", None)):
            with pytest.raises(psycopg.errors.InvalidParameterValue), connection.transaction():
                connection.execute(record, refused)
        types = ("text", "text", "jsonb", "jsonb")
        call = f"SELECT outbox_emit({', '.join(f'%s::pg_catalog.{each}' for each in types)})"
        wrongs = (("t!", "k", "1", None), ("t", None, "1", None), ("t", "k", "1", "[]"), ("t", "k", "1", '{"a": 1}'))
        for wrong in wrongs:
            with pytest.raises(psycopg.errors.InvalidParameterValue), connection.transaction():
                connection.execute(call, wrong)
    with psycopg.connect(unmigrated.dsn.get_secret_value()) as connection:
        assert connection.execute("SELECT count(*) FROM outbox").fetchall() == [(7,)]


def test_the_inbox_runs_nothing_of_it(hostile: Settings, unmigrated: Settings, topic: str, group: str) -> None:
    sent = produce(unmigrated, topic, [("a", "1"), ("b", "2")])
    plainly = psycopg.connect(unmigrated.dsn.get_secret_value(), autocommit=True)
    with plainly, Inbox(hostile, group=group, topics=[topic], handler=lambda _, event: record_effect(plainly, event)):
        eventually(lambda: len(effects(unmigrated)) == len(sent), 30)
    with connect(hostile) as connection:
        clean(connection, hostile, group, Retention(timedelta(0), timedelta(0)))


def test_staging_and_publishing_run_nothing_of_it(hostile: Settings, unmigrated: Settings) -> None:
    with connect(hostile) as connection:
        table = new_staging_table(hostile, connection, "job")
        table.lease(connection)
        with connection.transaction():
            staged = Staged(table, [Attempt("0" * 32, 0, 0)])
            publish_events(connection, staged, "job")
        table.drop(connection)
        new_staging_table(hostile, connection, "job")
        drop_orphans(connection, hostile.table, "job")
        assert connection.execute("SELECT pg_catalog.count(*) FROM outbox_staging").fetchall() == [(0,)]


def test_a_table_or_function_of_a_strangers_is_refused(unmigrated: Settings) -> None:
    """Planted before `outbox migrate` makes one of that name: with a trigger, say, or to be changed afterwards."""
    dsn = unmigrated.dsn.get_secret_value()
    for made, said in (
        ("TABLE outbox_migration (table_name text, name text, applied_at timestamptz)", "the table outbox_migration"),
        ("FUNCTION outbox_bytes(value text) RETURNS bytea LANGUAGE sql STABLE AS 'SELECT NULL::bytea'", "outbox_bytes"),
    ):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {ROLE}; GRANT CREATE ON SCHEMA public TO {ROLE}; SET ROLE {ROLE}")
            try:
                connection.execute(f"CREATE {made}")
                with pytest.raises(ServerRefused, match=f"{said}.* belongs to the role {ROLE}"):
                    migrate(unmigrated)
            finally:
                connection.execute(f"RESET ROLE; DROP OWNED BY {ROLE} CASCADE; DROP ROLE {ROLE}")
    migrate(unmigrated)


@pytest.fixture
def trapped(unmigrated: Settings) -> Settings:
    """A view in the place of each of our tables, in a schema that comes before that of the outbox."""
    dsn = unmigrated.dsn.get_secret_value()
    migrate(unmigrated)
    with psycopg.connect(dsn, autocommit=True) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'outbox\\_%'").fetchall()
        connection.execute("CREATE SCHEMA first")
        for (table,) in tables:
            connection.execute(f"CREATE VIEW first.{table} AS SELECT 1/0 AS trap")
    settings = Settings(**{**unmigrated.model_dump(), "dsn": f"{dsn}?options=-csearch_path%3Dfirst,public"})
    migrate(settings)
    return settings


def test_an_inbox_takes_no_table_of_a_schema_that_comes_first(trapped: Settings, topic: str, group: str) -> None:
    make_effect_table(trapped)
    produce(trapped, topic, [("a", "1"), ("b", "2")])
    fails = [True]

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.key_text == "a" and fails:
            raise ValueError("not now")
        record_effect(connection, event)

    with Inbox(trapped, group=group, topics=[topic], handler=handle, retry=Retry(attempts=1)):
        eventually(lambda: len(DeadLetters(trapped).list()) == 1 and len(effects(trapped)) == 1, 30)
        fails.clear()
        DeadLetters(trapped).retry(None)
        eventually(lambda: len(effects(trapped)) == 2, 30)


@pytest.mark.spark
def test_a_spark_write_takes_no_table_of_a_schema_that_comes_first(spark: SparkSession, trapped: Settings) -> None:
    """In both ways of writing; the dead letter is known by the outbox's plain name."""
    events = spark.createDataFrame([("k", "v"), ("k" * 101, "v")], "key string, value string")
    OutboxWrite(trapped).events(events, topic="t", on_bad_row="deadLetter").commit()
    options = {"dsn": trapped.dsn.get_secret_value(), "topic": "t", "onBadRow": "deadLetter"}
    events.write.format("outbox").options(**options).mode("append").save()
    assert len(operate.dead_letters(trapped)) == 2
    with psycopg.connect(trapped.dsn.get_secret_value()) as connection:
        assert connection.execute("SELECT count(*) FROM outbox").fetchall() == [(2,)]


def test_what_comes_first_on_the_search_path_later_is_not_taken_for_ours(unmigrated: Settings, topic: str) -> None:
    """A view in the place of one of our tables, in a schema that comes before that of the outbox."""
    dsn = unmigrated.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA first")
        settings = Settings(
            **{**unmigrated.model_dump(), "dsn": make_conninfo(dsn, options="-c search_path=first,public")}
        )
        migrate(unmigrated)
        for table in ("outbox_identity", "outbox_parked", "outbox_dead_letter", "outbox_history"):
            connection.execute(f"CREATE VIEW first.{table} AS SELECT 1/0 AS trap")
        migrate(settings)
        insert(unmigrated, topic, [("k", "1")])
        with Harvester(settings):
            eventually(lambda: read_status(settings).backlog == 0, 60)
        assert operate.parked_keys(settings) == []
        assert operate.dead_letters(settings) == []
    assert [record.value for record in consume(unmigrated, topic)] == ["1"]
