"""One process harvests the outboxes of all schemas that a pattern matches, while schemas come, go and break."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from psycopg import sql

from outbox_plugin import Event, Outbox, Settings, operate, tenants
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.core import resting_tenants, tenant_schedule
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.embedded.stack import EmbeddedStack
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.status.health_rules import Limits, health
from outbox_plugin.status.reader import read_status
from outbox_plugin.tenants import TenantHarvesters
from tests.harvesting import (
    backlog,
    by_key,
    consume,
    create_topic,
    delete_topic,
    environment,
    harvesters,
    insert,
    insert_numbered,
    last_progress,
    run_outbox,
)
from tests.inbox_support import query
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

HARVESTERS_SESSIONS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name ~ '^outbox harvester'
"""

WAKE_UP_LOCKS = """
    SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND application_name = 'outbox tenants (wake-up)'
"""


@pytest.fixture(autouse=True)
def _searches_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "SEARCH_SECONDS", 0.5)
    monkeypatch.setattr(tenants, "SLOW_SECONDS", 0.5)


@pytest.fixture
def pattern(unmigrated: Settings) -> Settings:
    """Settings for the outboxes of all schemas whose names begin with `tenant_`."""
    return unmigrated.model_copy(update={"table": "tenant_*.outbox", "listen": f"127.0.0.1:{free_port()}"})


@pytest.fixture
def topic(group: str, unmigrated: Settings) -> str:
    return create_topic(unmigrated, f"{group}-events")


@pytest.fixture
def relay(pattern: Settings) -> Iterator[TenantHarvesters]:
    """The service, not started yet."""
    service = TenantHarvesters(pattern)
    yield service
    service.stop()


def tenant(pattern: Settings, schema: str) -> Settings:
    """Settings of a tenant whose outbox has been migrated."""
    with psycopg.connect(pattern.dsn.get_secret_value()) as connection:
        connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'.encode())
    settings = pattern.of_schema(schema)
    migrate(settings)
    return settings


def execute(settings: Settings, statement: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(statement.encode())


def arrives(settings: Settings, topic: str, value: str) -> None:
    """Write an event, and wait until it is relayed."""
    insert(settings, topic, [(settings.table, value)])
    eventually(lambda: backlog(settings) == 0, 60)
    assert by_key(consume(settings, topic))[settings.table][-1] == value


def page(pattern: Settings, path: str) -> str:
    host, _, port = str(pattern.listen).partition(":")
    connection = HTTPConnection(host, int(port), timeout=30 * PATIENCE)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def count(pattern: Settings, state: str) -> float:
    """How many tenants /metrics says are in that state."""
    start = f'outbox_tenants{{group="{pattern.group}",state="{state}"}} '
    return next(
        float(line.removeprefix(start)) for line in page(pattern, "/metrics").splitlines() if line.startswith(start)
    )


def test_tenants_come_and_go(pattern: Settings, topic: str, relay: TenantHarvesters) -> None:
    relay.start()
    assert count(pattern, "harvested") == 0
    assert "ready: 0 schema(s)" in page(pattern, "/readyz")
    first, second = tenant(pattern, "tenant_a"), tenant(pattern, "tenant_B$1")
    tenant(pattern.model_copy(update={"table": "*.outbox"}), "other")
    for number in range(2):
        arrives(first, topic, f"a{number}")
        arrives(second, topic, f"b{number}")
    assert count(pattern, "harvested") == 2
    assert f'{{group="{first.group}"' in page(pattern, "/metrics")
    execute(first, "DROP SCHEMA tenant_a CASCADE")
    eventually(lambda: count(pattern, "harvested") == 1, 30)
    eventually(lambda: first.group not in page(pattern, "/metrics"), 60)
    assert f'outbox_purged_rows_total{{group="{second.group}"}} 2.0' in page(pattern, "/metrics")
    arrives(second, topic, "b2")
    arrives(tenant(pattern, "tenant_a"), topic, "again")
    assert "group " + first.group in page(pattern, "/readyz")
    eventually(lambda: f'outbox_purged_rows_total{{group="{first.group}"}} 1.0' in page(pattern, "/metrics"), 30)


def test_a_tenant_that_is_dropped_and_recreated_between_two_searches_is_harvested_as_a_new_one(
    pattern: Settings, topic: str, relay: TenantHarvesters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "SEARCH_SECONDS", 3_600.0)  # Its harvester notices by itself.
    only = tenant(pattern, "tenant_a")
    relay.start()
    arrives(only, topic, "1")
    execute(only, "DROP SCHEMA tenant_a CASCADE")
    arrives(tenant(pattern, "tenant_a"), topic, "2")
    eventually(lambda: last_progress(only) is not None, 30)  # Signed with the new outbox's secret.
    arrives(only, topic, "3")


def test_what_a_tenants_harvester_logs_names_the_tenant(
    pattern: Settings, topic: str, relay: TenantHarvesters, caplog: pytest.LogCaptureFixture
) -> None:
    """Also on the threads that the harvester starts, and at its end."""
    caplog.set_level(logging.INFO, "outbox_plugin")
    relay.start()
    for schema in ("tenant_a", "tenant_b"):
        arrives(tenant(pattern, schema), topic, schema)
    relay.stop()
    for said in ("leading as", "handed over"):
        lines = [(each.getMessage(), getattr(each, "schema", None)) for each in caplog.records]
        found = {schema: text for text, schema in lines if said in text}
        assert {schema: text.startswith(f"schema {schema}: shard 0: {said}") for schema, text in found.items()} == {
            "tenant_a": True,
            "tenant_b": True,
        }


def test_a_tenant_that_is_broken_harms_itself_alone(
    pattern: Settings, topic: str, relay: TenantHarvesters, caplog: pytest.LogCaptureFixture
) -> None:
    healthy, broken = tenant(pattern, "tenant_a"), tenant(pattern, "tenant_b")
    execute(broken, "ALTER TABLE tenant_b.outbox DROP COLUMN leader_id")
    relay.start()
    arrives(healthy, topic, "1")
    eventually(lambda: count(pattern, "failed") == 1, 30)
    assert "1 schema(s) are harvested; 1 cannot be: tenant_b" in page(pattern, "/readyz")
    [failure] = [each for each in caplog.records if "not harvested" in each.msg]
    assert failure.__dict__["schema"] == "tenant_b"
    arrives(healthy, topic, "2")
    execute(broken, "ALTER TABLE tenant_b.outbox ADD COLUMN leader_id TEXT")
    arrives(broken, topic, "3")
    eventually(lambda: count(pattern, "failed") == 0, 30)


def test_schemas_whose_names_kafka_or_our_sql_would_not_take_are_named_and_harm_nobody(
    pattern: Settings, topic: str, relay: TenantHarvesters, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["tenant_-", "tenant_a.b", "tenant_é", 'tenant_"', "tenant_'", "tenant_%s", "tenant_{}", "tenant_\n \\"]
    with psycopg.connect(pattern.dsn.get_secret_value()) as connection:
        for name in names:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
            for table in ("outbox", "outbox_identity"):
                connection.execute(sql.SQL("CREATE TABLE {} ()").format(sql.Identifier(name, table)))
    relay.start()
    arrives(tenant(pattern, "tenant_z"), topic, "1")
    assert count(pattern, "failed") == len(names)
    refused = [each.getMessage() for each in caplog.records if "begins with no digit" in each.getMessage()]
    assert len(refused) == len(names)
    assert all(each.isprintable() for each in refused)
    status = run_outbox("status", "--json", env=environment(pattern))
    assert "backlog" in json.loads(status.stdout)
    assert status.stderr.count("is left out") == len(names)


def test_a_schema_whose_topics_kafka_would_not_tell_from_an_earlier_ones_is_left_out(
    pattern: Settings, topic: str, relay: TenantHarvesters, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tenant(pattern, "tenant_b_"), tenant(pattern, "tenant_a$")
    relay.start()
    for each in (first, second):
        arrives(each, topic, "1")
    for schema in ("tenant_b$", "tenant_a_"):
        tenant(pattern, schema)
    eventually(lambda: count(pattern, "failed") == 2, 60)
    refused = [each.getMessage() for each in caplog.records if "not harvested" in each.getMessage()]
    assert sorted(line[: line.index(", because")] for line in refused) == [
        "schema tenant_a_: not harvested: Kafka does not tell the names of its topics from those of schema tenant_a$",
        "schema tenant_b$: not harvested: Kafka does not tell the names of its topics from those of schema tenant_b_",
    ]
    for each in (first, second):
        arrives(each, topic, "2")


def test_tenants_whose_tables_are_locked_hold_nobody_up(
    pattern: Settings, topic: str, relay: TenantHarvesters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "STOP_SECONDS", 1.0)
    monkeypatch.setattr(tenants, "STARTS_AT_ONCE", 2)
    locked = [tenant(pattern, f"tenant_{number}") for number in range(3)]
    healthy = tenant(pattern, "tenant_z")  # Behind them in the order of starts.
    with psycopg.connect(pattern.dsn.get_secret_value()) as holder:
        for each in locked:
            holder.execute(f"LOCK TABLE {each.table}_identity IN ACCESS EXCLUSIVE MODE".encode())
        relay.start()
        arrives(healthy, topic, "1")
    for each in locked:
        arrives(each, topic, "2")


def test_it_ends_while_a_tenant_is_locked(pattern: Settings, topic: str, tmp_path: Path) -> None:
    healthy, locked = tenant(pattern, "tenant_a"), tenant(pattern, "tenant_b")
    with psycopg.connect(pattern.dsn.get_secret_value()) as holder:
        holder.execute(f"LOCK TABLE {locked.table}_identity IN ACCESS EXCLUSIVE MODE".encode())
        with harvesters(pattern, tmp_path) as [process]:
            arrives(healthy, topic, "1")
            assert process.terminate(seconds=60) == 0


def test_commands_serve_all_tenants_or_say_that_one_must_be_named(pattern: Settings, topic: str) -> None:
    env = environment(pattern)
    nobody = run_outbox("status", env=env)
    assert nobody.returncode == 2
    assert nobody.stderr == (
        "outbox: OUTBOX_TABLE: no schema has an outbox that 'tenant_*.outbox' matches; create a schema's with "
        "OUTBOX_TABLE=<schema>.outbox outbox migrate\n"
    )
    both = [tenant(pattern, "tenant_a"), tenant(pattern, "tenant_b")]
    for each in both:
        insert(each, topic, [("k", "v")])
    found = json.loads(run_outbox("status", "--json", env=env).stdout)
    assert {table: status["backlog"] for table, status in found.items()} == {"tenant_a.outbox": 1, "tenant_b.outbox": 1}
    assert run_outbox("migrate", env=env).stdout.splitlines() == [f"{each.table} is up to date" for each in both]
    assert run_outbox("grants", "--role", "harvester", "--to", "relay", env=env).stdout.count('ON SCHEMA "tenant_') >= 2


@pytest.mark.parametrize("by", ["pattern", "list"])
def test_an_operator_names_the_outbox_that_a_command_is_for(by: str, pattern: Settings) -> None:
    both = [tenant(pattern, "tenant_a"), tenant(pattern, "tenant_b")]
    if by == "list":
        listed = [{"table": each.table, "group": each.group} for each in both]
        pattern = pattern.model_copy(update={"table": "outbox", "outboxes": listed})
    env = environment(pattern)
    for command in (["pause"], ["parked", "list"], ["dead-letters", "discard", "--all"], ["replay"]):
        unnamed = run_outbox(*command, env=env)
        assert (unnamed.returncode, unnamed.stderr) == (
            2,
            "outbox: the settings name 2 outboxes: say which with --outbox (tenant_a.outbox, tenant_b.outbox)\n",
        )
    unknown = run_outbox("pause", "--outbox", "tenant_c.outbox", env=env)
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "outbox: --outbox: expected one of tenant_a.outbox, tenant_b.outbox (given: 'tenant_c.outbox')\n",
    )
    assert run_outbox("pause", "--outbox", "tenant_b.outbox", env=env).stdout == "paused tenant_b.outbox\n"
    with psycopg.connect(pattern.dsn.get_secret_value()) as connection:
        paused = [
            bool(connection.execute(f"SELECT paused FROM {each.table}_identity".encode()).fetchall()[0][0])
            for each in both
        ]
    assert paused == [False, True]


def test_a_pattern_does_not_trust_a_schema_of_somebody_who_may_not_create_schemas(
    pattern: Settings, topic: str, relay: TenantHarvesters
) -> None:
    tenant(pattern, "tenant_a")
    hostile = tenant(pattern, "tenant_b")
    role = f"owner_{pattern.group.replace('-', '_')}"
    execute(hostile, f"CREATE ROLE {role}")
    try:
        for owned in ("SCHEMA tenant_b", "TABLE tenant_b.outbox", "TABLE tenant_b.outbox_identity"):
            execute(hostile, f"ALTER {owned} OWNER TO {role}")
            status = run_outbox("status", "--json", env=environment(pattern))
            assert f"schema tenant_b is left out: its owner '{role}' may not create schemas" in status.stderr
            assert "backlog" in json.loads(status.stdout)  # Of one outbox alone.
            execute(hostile, f"ALTER {owned} OWNER TO CURRENT_USER")
        execute(hostile, f"ALTER TABLE tenant_b.outbox OWNER TO {role}")
        relay.start()
        eventually(lambda: count(pattern, "failed") == 1, 30)
        assert "1 schema(s) are harvested; 1 cannot be: tenant_b" in page(pattern, "/readyz")
        database = str(hostile.dsn.get_secret_value()).rsplit("/", 1)[1]
        execute(hostile, f"GRANT CREATE ON DATABASE {database} TO {role}")
        arrives(hostile, topic, "trusted")
        execute(hostile, f"REVOKE CREATE ON DATABASE {database} FROM {role}")
        eventually(lambda: count(pattern, "failed") == 1, 30)  # Also while it is harvested.
    finally:
        execute(hostile, f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


def test_an_application_must_name_its_tenant(pattern: Settings) -> None:
    with (
        psycopg.connect(pattern.dsn.get_secret_value()) as connection,
        pytest.raises(InvalidSetting, match="names the outboxes of many schemas"),
    ):
        Outbox(table=pattern.table).emit(connection, Event(topic="t", key="k", value={}))


@pytest.fixture
def resting(pattern: Settings, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """The pattern, where tenants rest after a second; a service harvests them. A parameter has further settings."""
    settings = pattern.model_copy(update={"tenants_rest": 1.0, **getattr(request, "param", {})})
    service = TenantHarvesters(settings)
    service.start()
    yield settings
    service.stop()


def is_at_rest(settings: Settings) -> bool:
    found = read_status(settings)
    return found.is_at_rest and health(found, Limits()).passed


def test_a_tenant_without_events_rests_and_is_woken_by_the_next_one(resting: Settings, topic: str) -> None:
    first, second = tenant(resting, "tenant_a"), tenant(resting, "tenant_b")
    for number in range(2):
        eventually(lambda: count(resting, "resting") == 2, 60)
        assert count(resting, "harvested") == count(resting, "failed") == 0
        assert "ready: 0 schema(s) are harvested, 2 are at rest" in page(resting, "/readyz")
        eventually(lambda: is_at_rest(first) and is_at_rest(second), 60)
        eventually(lambda: query(first, HARVESTERS_SESSIONS) == [(0,)], 30)
        arrives(first, topic, f"a{number}")
        arrives(second, topic, f"b{number}")


def test_rows_that_a_resting_process_finds_at_its_start_are_relayed(
    pattern: Settings, topic: str, resting: Settings
) -> None:
    only = tenant(pattern, "tenant_a")
    insert(only, topic, [("k", "1")])
    eventually(lambda: backlog(only) == 0, 60)


def test_a_resting_tenant_is_woken_however_its_rows_come(
    resting: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting_tenants, "CHECK_AGAIN_SECONDS", 1.0)
    only = tenant(resting, "tenant_a")
    for statement in (
        f"INSERT INTO tenant_a.outbox (id, kafka_topic, kafka_key) VALUES (-5, '{topic}', 'an id of its own')",
        f"INSERT INTO tenant_a.outbox (kafka_topic, kafka_key) SELECT '{topic}', 'k' FROM generate_series(1, 100)",
        "TRUNCATE tenant_a.outbox RESTART IDENTITY",
        f"INSERT INTO tenant_a.outbox (kafka_topic, kafka_key) VALUES ('{topic}', 'k')",
    ):
        eventually(lambda: count(resting, "resting") == 1, 60)
        execute(only, statement)
        eventually(lambda: backlog(only) == 0, 60)


def test_a_resting_tenant_whose_ids_begin_again_is_woken_by_its_next_row(
    resting: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last id is the same as before."""
    monkeypatch.setattr(resting_tenants, "CHECK_AGAIN_SECONDS", 3_600.0)
    only = tenant(resting, "tenant_a")
    row = f"INSERT INTO tenant_a.outbox (kafka_topic, kafka_key) VALUES ('{topic}', 'k')"
    for statement in (row, f"TRUNCATE tenant_a.outbox RESTART IDENTITY; {row}"):
        execute(only, statement)
        eventually(lambda: backlog(only) == 0, 20)
        eventually(lambda: count(resting, "resting") == 1, 60)
    assert len(consume(only, topic)) == 2


def test_writers_wake_a_tenant_at_rest_without_a_poll(
    resting: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = tenant(resting, "tenant_a")
    migrate(only, wake_up=True)
    arrives(only, topic, "before")
    eventually(lambda: count(resting, "resting") == 1, 60)
    eventually(lambda: query(only, WAKE_UP_LOCKS) == [(1,)], 60)
    monkeypatch.setattr(tenants, "CHECK_SECONDS", 3_600.0)
    arrives(only, topic, "after")


def test_a_writer_wakes_a_tenant_at_rest_by_a_row_with_an_id_of_its_own(
    resting: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No id is drawn for it, so polls do not see it soon."""
    monkeypatch.setattr(resting_tenants, "CHECK_AGAIN_SECONDS", 3_600.0)
    only = tenant(resting, "tenant_a")
    migrate(only, wake_up=True)
    arrives(only, topic, "before")
    eventually(lambda: count(resting, "resting") == 1, 60)
    eventually(lambda: query(only, WAKE_UP_LOCKS) == [(1,)], 60)
    execute(only, f"INSERT INTO tenant_a.outbox (id, kafka_topic, kafka_key) VALUES (-5, '{topic}', 'k')")
    eventually(lambda: backlog(only) == 0, 20)


@pytest.fixture
def at_rest(resting: Settings, topic: str) -> Settings:
    """Settings of a tenant that rests after its first event, and whose harvester has ended."""
    only = tenant(resting, "tenant_a")
    arrives(only, topic, "before")
    eventually(lambda: count(resting, "resting") == 1, 60)
    eventually(lambda: query(only, HARVESTERS_SESSIONS) == [(0,)], 60)
    return only


def cleanup_policy(settings: Settings, topic: str) -> str:
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [asked] = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    return str(asked.result(30)["cleanup.policy"].value)


@pytest.mark.parametrize("resting", [{"shards": 2}], indirect=True, ids=["two shards"])
@pytest.mark.parametrize("name", ["leader_topic", "progress_topic"])
def test_a_resting_tenant_whose_own_topic_is_deleted_relays_all_shards_rows(
    at_rest: Settings, topic: str, name: str
) -> None:
    """The broker makes a topic on its first use, but with one partition: the harvester must make it before."""
    names = KafkaNames.of(at_rest)
    delete_topic(at_rest, getattr(names, name))
    insert_numbered(at_rest, topic, 0, 100)
    eventually(lambda: backlog(at_rest) == 0, 30)
    assert cleanup_policy(at_rest, names.progress_topic) == "compact"


def test_a_resting_tenants_progress_topic_is_made_to_stay_when_it_wakes(at_rest: Settings, topic: str) -> None:
    progress_topic = KafkaNames.of(at_rest).progress_topic
    admin = AdminClient({"bootstrap.servers": at_rest.bootstrap_servers})
    delete = ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, progress_topic, incremental_configs=[delete])
    [changed] = admin.incremental_alter_configs([resource]).values()
    changed.result(30)
    arrives(at_rest, topic, "after")
    assert cleanup_policy(at_rest, progress_topic) == "compact"


def test_a_tenant_that_wakes_while_kafka_is_away_has_failed_until_it_is_back(
    servers: EmbeddedStack, resting: Settings, at_rest: Settings, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = servers.kafka
    assert isinstance(kafka, EmbeddedKafka)
    kafka.stop()  # After a kill, it would first read the logs of all topics that tests before this one have made.
    try:
        insert(at_rest, topic, [(at_rest.table, "after")])
        eventually(lambda: count(resting, "failed") == 1, 30)
        assert "1 cannot be: tenant_a" in page(resting, "/readyz")
        assert any("not harvested" in each.getMessage() for each in caplog.records)
    finally:
        kafka.launch()
        kafka.wait()
    eventually(lambda: backlog(at_rest) == 0, 60)


def test_a_tenant_that_wakes_has_failed_if_its_last_progress_record_is_lost(
    resting: Settings, at_rest: Settings, topic: str
) -> None:
    """Another process may have led it meanwhile, and have been killed."""
    execute(at_rest, "UPDATE tenant_a.outbox_identity SET recorded = jsonb_build_object('0', term)")
    delete_topic(at_rest, KafkaNames.of(at_rest).progress_topic)
    insert(at_rest, topic, [("k", "after")])
    eventually(lambda: count(resting, "failed") == 1, 30)


def test_a_tenant_that_wakes_has_failed_if_its_table_was_broken_while_it_rested(
    resting: Settings, at_rest: Settings, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    execute(at_rest, "ALTER TABLE tenant_a.outbox DROP COLUMN leader_id")
    insert(at_rest, topic, [(at_rest.table, "after")])
    eventually(lambda: count(resting, "failed") == 1, 30)
    assert "1 cannot be: tenant_a" in page(resting, "/readyz")
    assert any("not harvested" in each.msg and "leader_id" in each.getMessage() for each in caplog.records)
    execute(at_rest, "ALTER TABLE tenant_a.outbox ADD COLUMN leader_id UUID")
    eventually(lambda: backlog(at_rest) == 0, 60)
    assert [record.value for record in consume(at_rest, topic)] == ["before", "after"]


def test_a_long_transaction_keeps_its_tenant_awake(resting: Settings, topic: str) -> None:
    only = tenant(resting, "tenant_a")
    eventually(lambda: count(resting, "resting") == 1, 60)
    with psycopg.connect(only.dsn.get_secret_value()) as writing:
        writing.execute(f"INSERT INTO tenant_a.outbox (kafka_topic, kafka_key) VALUES ('{topic}', 'k')".encode())
        eventually(lambda: count(resting, "harvested") == 1, 60)
        awake_until = time.monotonic() + 5.0
        eventually(lambda: time.monotonic() > awake_until or count(resting, "resting") == 1, 60)
        assert count(resting, "harvested") == 1
    eventually(lambda: backlog(only) == 0, 60)


def test_tenants_that_are_never_quiet_take_turns_where_places_are_few(
    resting: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "MAX_AWAKE", 1)
    monkeypatch.setattr(tenant_schedule, "TURN_SECONDS", 3.0)
    busy = [tenant(resting, f"tenant_{letter}") for letter in "abc"]
    with ExitStack() as writing:
        for each in busy:  # While a transaction is open, its tenant is awake.
            open_ = writing.enter_context(psycopg.connect(each.dsn.get_secret_value()))
            open_.execute(f"INSERT INTO {each.table} (kafka_topic, kafka_key) VALUES ('{topic}', 'late')".encode())
        eventually(lambda: count(resting, "waiting") == 2, 60)
        assert count(resting, "failed") == 0
        for each in busy:
            arrives(each, topic, "while others are busy")
    eventually(lambda: count(resting, "resting") == 3, 60)
    assert sum(backlog(each) for each in busy) == 0


def test_a_crash_of_postgres_wakes_only_the_tenants_with_events(
    servers: EmbeddedStack, resting: Settings, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All sequences jump when it recovers."""
    caplog.set_level(logging.INFO, "outbox_plugin")
    first, second = tenant(resting, "tenant_a"), tenant(resting, "tenant_b")
    for each in (first, second):
        arrives(each, topic, "before")
    eventually(lambda: count(resting, "resting") == 2, 60)
    last_id = query(second, "SELECT last_value FROM tenant_b.outbox_id_seq")
    caplog.clear()
    servers.postgres.kill()
    servers.postgres.launch()
    servers.postgres.wait()
    assert query(second, "SELECT last_value FROM tenant_b.outbox_id_seq") > last_id
    arrives(first, topic, "after")
    eventually(lambda: count(resting, "resting") == 2, 60)
    led = {getattr(each, "schema", None) for each in caplog.records if "leading as" in each.getMessage()}
    assert led == {"tenant_a"}


def test_a_locked_tenant_keeps_no_other_one_asleep(resting: Settings, topic: str) -> None:
    locked, other = tenant(resting, "tenant_a"), tenant(resting, "tenant_b")
    eventually(lambda: count(resting, "resting") == 2, 60)
    with psycopg.connect(locked.dsn.get_secret_value()) as locking:
        locking.execute("LOCK TABLE tenant_a.outbox; ALTER SEQUENCE tenant_a.outbox_id_seq INCREMENT BY 1")
        for number in range(2):
            arrives(other, topic, str(number))
            eventually(lambda: query(other, "SELECT count(*) FROM tenant_b.outbox") == [(0,)], 30)
    arrives(locked, topic, "at last")


def test_parked_rows_keep_their_tenant_awake(resting: Settings, topic: str) -> None:
    only = tenant(resting, "tenant_a")
    execute(
        only,
        "INSERT INTO tenant_a.outbox (kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
        f" VALUES ('{topic}', 'k', '{{a,b}}', '{{1}}')",
    )
    eventually(lambda: len(operate.parked_keys(only)) == 1, 60)
    eventually(lambda: count(resting, "harvested") == 1, 30)


def test_only_tenants_of_a_pattern_rest(settings: Settings) -> None:
    done = run_outbox("harvest", env=environment(settings) | {"OUTBOX_TENANTS_REST": "60"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "OUTBOX_TENANTS_REST: only outboxes that OUTBOX_TABLE matches by a * rest (given: 'outbox')" in done.stderr
