"""A role that has what `outbox grants` prints may do its work, and no more."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import SparkSession

from outbox_plugin import Event, Harvester, Outbox, Settings, operate
from outbox_plugin.access.grants import postgres_grants
from outbox_plugin.access.roles import Role
from outbox_plugin.consuming import consume_range, set_position
from outbox_plugin.consuming.positions import read_position
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import plan
from outbox_plugin.errors import ServerRefused
from outbox_plugin.inbox import Inbox, Received, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from outbox_plugin.inbox.retention import Retention, clean
from outbox_plugin.observe import table_poller
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.status.reader import read_status
from outbox_plugin.verification.emitted_counts import emitted_counts
from tests.harvesting import backlog, by_key, consume, drained, environment, insert, run_outbox
from tests.inbox_support import effects, make_effect_table, produce, record_effect
from tests.roles import as_role, let_in
from tests.spark_support import count, staging_tables
from tests.support import eventually

pytestmark = pytest.mark.integration

OTHER_TABLES = (
    *("outbox_identity", "outbox_secret", "outbox_parked", "outbox_dead_letter", "outbox_history", "outbox_job"),
    *("outbox_stream", "outbox_staging", "outbox_inbox", "outbox_inbox_dead_letter", "outbox_inbox_position"),
    *("outbox_consumer_position", "outbox_key_summary"),
)
Grant = Callable[[Role], Settings]


@pytest.fixture
def grant(settings: Settings) -> Iterator[Grant]:
    """Makes a role of Postgres with the rights of a role of ours, and gives the settings with which it logs in."""
    dsn = settings.dsn.get_secret_value()
    names: list[str] = []

    def make(role: Role) -> Settings:
        names.append(f"Test {role} {uuid.uuid4().hex[:8]}")  # A name that has to be quoted.
        with psycopg.connect(dsn) as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(names[-1])))
            connection.execute(postgres_grants(settings, role, names[-1]).encode())
        let_in(dsn, names[-1])
        return Settings(**{**settings.model_dump(), "dsn": as_role(dsn, names[-1])})

    with psycopg.connect(dsn) as connection:  # As where an administrator trusts nobody by default.
        connection.execute(
            "REVOKE ALL ON SCHEMA public FROM PUBLIC; REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC"
        )
    yield make
    with psycopg.connect(dsn) as connection:
        for name in names:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def refused(role: Settings, statement: str) -> bool:
    """Whether Postgres says that the role may not."""
    with psycopg.connect(role.dsn.get_secret_value()) as connection:
        try:
            connection.execute(statement.encode())
        except psycopg.errors.InsufficientPrivilege:
            return True
    return False


def record_each(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
    for record in records:
        record_effect(connection, record)


def let_everybody_record(settings: Settings) -> None:
    """What a handler writes, its own database's owner grants."""
    make_effect_table(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("GRANT INSERT ON effect TO PUBLIC; GRANT USAGE ON SEQUENCE effect_number_seq TO PUBLIC")


def test_the_command_prints_what_the_owner_can_run(settings: Settings) -> None:
    env = environment(settings)
    printed = run_outbox("grants", "--role", "emitter", "--to", 'shop\'s "app"', env=env)
    assert printed.returncode == 0, printed.stderr
    assert 'GRANT INSERT ON "public"."outbox" TO "shop\'s ""app""";' in printed.stdout
    assert run_outbox("grants", "--role", "emitter", "--to", "app", "--topic", "t", env=env).returncode == 2
    assert run_outbox("grants", "--role", "nobody", "--to", "app", env=env).returncode == 2


def test_rights_are_granted_on_a_migrated_outbox_alone(unmigrated: Settings) -> None:
    with pytest.raises(ServerRefused, match="run `outbox migrate` first"):
        postgres_grants(unmigrated, Role.EMITTER, "app")


def test_the_sequence_of_a_renamed_table_is_found(unmigrated: Settings) -> None:
    """Its name does not follow the table's."""
    with psycopg.connect(unmigrated.dsn.get_secret_value()) as connection:
        connection.execute('CREATE SCHEMA "Shop"; SET search_path = "Shop"')
        connection.execute(
            "CREATE TABLE events (id BIGSERIAL PRIMARY KEY, create_time TIMESTAMPTZ NOT NULL DEFAULT now(),"
            " kafka_topic VARCHAR(249) NOT NULL, kafka_key VARCHAR(100) NOT NULL, kafka_value VARCHAR(10000),"
            " kafka_header_keys TEXT[] NOT NULL, kafka_header_values TEXT[] NOT NULL, leader_id UUID);"
            " ALTER TABLE events RENAME TO outbox"
        )
    renamed = unmigrated.model_copy(update={"table": "Shop.outbox"})
    migrate(renamed)
    assert 'GRANT USAGE ON SEQUENCE "Shop"."events_id_seq" TO "app";' in postgres_grants(renamed, Role.EMITTER, "app")


def test_an_emitter_emits_and_reads_nothing(grant: Grant, settings: Settings) -> None:
    emitter = grant(Role.EMITTER)
    with psycopg.connect(emitter.dsn.get_secret_value()) as connection:
        Outbox().emit(connection, Event(topic="orders", key="k", value=1))
        Outbox().emit_many(connection, [Event(topic="orders", key="k", value=2)])
        connection.execute("SELECT outbox_emit('orders', 'k', '3')")
        Outbox().emit(connection, Event(topic="orders", key=b"\xff", value=b"\xff", partition=0))
        connection.execute("SELECT outbox_emit_record('orders', '\\xff', '4')")
    assert backlog(settings) == 5
    assert refused(emitter, "SELECT FROM outbox")
    assert refused(emitter, "DELETE FROM outbox")
    assert all(refused(emitter, f"SELECT FROM {each}") for each in OTHER_TABLES)
    assert refused(emitter, "SELECT outbox_history_days(interval '0')")


def test_an_emitter_wakes_a_sleeping_harvester(grant: Grant, settings: Settings) -> None:
    migrate(settings, wake_up=True)
    with psycopg.connect(grant(Role.EMITTER).dsn.get_secret_value()) as connection:
        Outbox().emit(connection, Event(topic="orders", key="k", value=1))
    assert backlog(settings) == 1


@pytest.mark.parametrize(
    ("delivery", "retention"),
    [("exactly-once", None), ("exactly-once", timedelta(days=7)), ("at-least-once", None)],
)
def test_a_harvester_relays_and_parks(
    grant: Grant, settings: Settings, topic: str, delivery: str, retention: timedelta | None
) -> None:
    """Also where it keeps what it has published, and drops a day whose time is over; and woken by writers."""
    dsn = settings.dsn.get_secret_value()
    migrate(settings, wake_up=True)
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TABLE old PARTITION OF outbox_history FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
        )
    harvester = grant(Role.HARVESTER).model_copy(update={"retention": retention, "delivery": delivery})
    insert(settings, topic, [("good", "1"), ("bad", "x" * 2_000_000), ("good", "2")])
    with Harvester(harvester):
        eventually(lambda: read_status(harvester).parked_keys == 1, 60)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DELETE FROM outbox WHERE kafka_key = 'bad'")
        drained(settings)
    assert [record.value for record in consume(settings, topic)] == ["1", "2"]
    assert count(settings, "outbox_history") == (2 if retention else 0)
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT to_regclass('old') IS NULL").fetchall() == [(retention is not None,)]
    assert refused(harvester, "INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('orders', 'k')")


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_harvester_makes_dead_letters(grant: Grant, settings: Settings, topic: str, delivery: str) -> None:
    harvester = grant(Role.HARVESTER).model_copy(update={"bad_rows": "dead-letter", "delivery": delivery})
    insert(settings, topic, [("bad", "x" * 2_000_000), ("bad", "1")])
    with Harvester(harvester):
        drained(settings)
    assert (by_key(consume(settings, topic)), count(settings, "outbox_dead_letter")) == ({"bad": ["1"]}, 1)


def test_a_harvester_may_change_the_number_of_shards_and_adopt(grant: Grant, settings: Settings, topic: str) -> None:
    harvester = grant(Role.HARVESTER)
    with Harvester(harvester):
        insert(settings, topic, [("k", "1")])
        drained(settings)
    other = harvester.model_copy(update={"shards": 2, "group": f"{harvester.group}-2"})
    with Harvester(other, adopt=True):
        insert(settings, topic, [("k", "2")])
        drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["1", "2"]}


@pytest.mark.parametrize("role", [Role.HARVESTER, Role.MONITOR])
def test_who_watches_sees_what_the_metrics_show(
    grant: Grant, settings: Settings, topic: str, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_poller, "STATEMENT_MILLISECONDS", 60_000)  # A busy machine may take its time.
    watcher = grant(role)
    insert(settings, topic, [("key", "value")])
    with closing(connect(watcher)) as connection:
        found = table_poller.read_table(connection, watcher.table, with_schema(connection, watcher.table))
    assert found.waiting is not None
    assert (found.waiting[0].rows, found.parked_keys, found.dead_letters) == (1, 0, 0)
    assert found.size is not None


@pytest.mark.spark
def test_a_spark_job_writes_and_creates_nothing_beside_the_outbox(
    spark: SparkSession, grant: Grant, settings: Settings
) -> None:
    """In both ways of writing; a row that the outbox would refuse goes to the dead letters. A monitor verifies them."""
    writer, monitor = grant(Role.SPARK), grant(Role.MONITOR)
    events = spark.createDataFrame([("k", "v"), ("k" * 101, "v")], "key string, value string")
    written = OutboxWrite(writer, job_id="nightly").events(events, topic="t", on_bad_row="deadLetter").commit()
    assert (written.events, written.set_aside) == (1, 1)
    options = {"dsn": writer.dsn.get_secret_value(), "topic": "t", "onBadRow": "deadLetter"}
    events.write.format("outbox").options(**options).mode("append").save()
    assert (count(settings, "outbox"), count(settings, "outbox_dead_letter")) == (2, 2)
    assert staging_tables(settings) == set()
    assert refused(writer, "CREATE TABLE beside (x int)")
    assert emitted_counts(monitor, ["nightly"]) == {"nightly": 1}


@pytest.mark.spark
def test_a_spark_stream_writes_and_is_retried(
    spark: SparkSession, grant: Grant, settings: Settings, tmp_path: Path
) -> None:
    writer = grant(Role.SPARK)
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    events = rows.selectExpr("cast(value % 3 AS string) AS key", "cast(value AS string) AS value")
    stream = (
        events.writeStream.format("outbox")
        .options(dsn=writer.dsn.get_secret_value(), topic="t")
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        eventually(lambda: count(settings, "outbox") >= 10 or stream.exception(), 60)
    finally:
        stream.stop()
    assert stream.exception() is None


def test_an_inbox_handles_retries_and_cleans(grant: Grant, settings: Settings, topic: str, group: str) -> None:
    inbox, operator = grant(Role.INBOX), grant(Role.OPERATOR)
    let_everybody_record(settings)
    fails = True

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.key_text == "bad" and fails:
            raise ValueError("not now")
        record_effect(connection, event)

    produce(settings, topic, [("good", "1"), ("bad", "2"), ("worse", "3")])
    retry = Retry(attempts=1, first_seconds=0.05, most_seconds=0.1)
    with Inbox(inbox, group=group, topics=[topic], handler=handle, retry=retry):
        eventually(lambda: len(DeadLetters(operator).list(group)) == 1, 60)
        fails = False
        assert len(DeadLetters(operator).retry(None, group)) == 1
        eventually(lambda: len(effects(settings)) == 3, 60)
        fails = True
        produce(settings, topic, [("bad", "4")])
        eventually(lambda: len(DeadLetters(operator).list(group)) == 1, 60)
        assert len(DeadLetters(operator).discard(None, group)) == 1
    with closing(connect(inbox)) as connection:
        clean(connection, inbox, group, Retention(timedelta(0), timedelta(0)))
    assert count(settings, "outbox_inbox") == 0
    assert refused(inbox, "SELECT FROM outbox")
    assert refused(operator, "SELECT FROM effect")


def test_a_range_is_consumed_and_its_position_set(grant: Grant, settings: Settings, topic: str) -> None:
    inbox = grant(Role.INBOX)
    let_everybody_record(settings)
    produce(settings, topic, [("a", "1"), ("b", "2")])
    wanted = plan("totals", topic, read_position(inbox, "totals", topic), topic_state(inbox, topic), 100).range
    assert wanted is not None
    consume_range(inbox, wanted, record_each)
    assert len(effects(settings)) == 2
    set_position(grant(Role.OPERATOR), "totals", topic, "beginning")


def test_an_operator_does_what_operators_do(grant: Grant, settings: Settings, topic: str) -> None:
    operator = grant(Role.OPERATOR)
    kept = settings.model_copy(update={"retention": timedelta(days=7)})
    letters = kept.model_copy(update={"bad_rows": "dead-letter"})
    operate.pause(operator)
    insert(settings, topic, [("k", "1"), ("bad", "x" * 2_000_000)])
    with Harvester(kept):
        operate.resume(operator)
        eventually(lambda: len(operate.parked_keys(operator)) == 1, 60)
    with Harvester(letters):
        operate.release(operator)
        drained(settings)
    [letter] = operate.dead_letters(operator)
    assert operate.retry_dead_letters(operator, [letter.id]) == 1
    with Harvester(letters):
        drained(settings)
    assert operate.discard_dead_letters(operator, None) == 1
    assert operate.replay(operator, topic=topic) == 1
    assert (read_status(operator).backlog, read_status(operator).errors) == (1, ())
    with Harvester(settings):
        eventually(lambda: read_status(operator).shards[0].leader, 30)
        assert read_status(operator).shards[0].trouble is None  # It can tell heartbeats from forged ones.
    assert refused(operator, "DELETE FROM outbox")
    assert refused(operator, "TRUNCATE outbox_history")


def test_a_monitor_sees_the_status_and_changes_nothing(grant: Grant, settings: Settings, topic: str) -> None:
    monitor = grant(Role.MONITOR)
    insert(settings, topic, [("k", "1")])
    with Harvester(settings):
        drained(settings)
        eventually(lambda: read_status(monitor).shards[0].leader, 30)
        assert (read_status(monitor).errors, read_status(monitor).shards[0].trouble) == ((), None)
    assert DeadLetters(monitor).list(None) == []
    assert read_position(monitor, "totals", topic) is None
    for each in ("outbox", *OTHER_TABLES):
        assert refused(monitor, f"DELETE FROM {each}"), each
        assert refused(monitor, f"INSERT INTO {each} DEFAULT VALUES"), each
