"""`outbox migrate --sql` prints what a DBA can run: it changes nothing, and ends where a migration would."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.embedded.postgres import _binary
from outbox_plugin.errors import InvalidSetting, ServerRefused
from outbox_plugin.schema.migrate import migrate, migrations
from outbox_plugin.schema.migration_script import migration_sql
from outbox_plugin.schema.statements import compose, statement
from tests.harvesting import environment, run_outbox

pytestmark = pytest.mark.integration

GOHARVEST = """
CREATE TABLE outbox (id BIGSERIAL PRIMARY KEY, create_time TIMESTAMPTZ NOT NULL, kafka_topic VARCHAR(249) NOT NULL,
    kafka_key VARCHAR(100) NOT NULL, kafka_value VARCHAR(10000), kafka_header_keys TEXT[] NOT NULL,
    kafka_header_values TEXT[] NOT NULL, leader_id UUID)
"""


@pytest.fixture
def twin(unmigrated: Settings) -> Iterator[Settings]:
    """Settings for another empty database."""
    dsn = unmigrated.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as connection:
        name = f"{connection.info.dbname}_twin"
        connection.execute(f"CREATE DATABASE {name}")
        yield unmigrated.model_copy(update={"dsn": SecretStr(make_conninfo(dsn, dbname=name))})
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def execute(settings: Settings, text: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(text)


def run_with_psql(settings: Settings, script: str) -> subprocess.CompletedProcess[str]:
    command = [str(_binary("psql")), "-X", "-q", "-v", "ON_ERROR_STOP=1", settings.dsn.get_secret_value()]
    env = {**os.environ, "PGOPTIONS": "-c client_min_messages=warning"}
    return subprocess.run(command, input=script, env=env, capture_output=True, text=True, check=False)


def schema(settings: Settings) -> str:
    """Everything in the database but its rows, and the ledger's names."""
    dsn = settings.dsn.get_secret_value()
    done = subprocess.run([str(_binary("pg_dump")), "--schema-only", dsn], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with psycopg.connect(dsn) as connection:
        ledger: list[tuple[str, str]] = []
        if connection.execute("SELECT to_regclass('public.outbox_migration')").fetchone() != (None,):
            ledger = connection.execute("SELECT table_name, name FROM outbox_migration ORDER BY 1, 2").fetchall()
    return re.sub(r"^\\(un)?restrict .*$", "", done.stdout, flags=re.MULTILINE) + str(ledger)


def nothing(settings: Settings) -> None:
    """The database is empty."""


def half_migrated(settings: Settings) -> None:
    """As an earlier version has left it: later tables and columns are not there."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(statement("migrate", "create_ledger", "public.outbox"))
        for name, text in list(migrations().items())[:6]:
            connection.execute(compose(text, "public.outbox"))
            connection.execute("INSERT INTO outbox_migration VALUES ('outbox', %s)", (name,))


def goharvests(settings: Settings) -> None:
    execute(settings, GOHARVEST)


def without_a_trigger(settings: Settings) -> None:
    migrate(settings)
    execute(settings, "DROP TRIGGER outbox_truncated ON outbox")


def dropped(settings: Settings) -> None:
    migrate(settings)
    execute(settings, "DROP TABLE outbox")


@pytest.mark.parametrize("before", [nothing, half_migrated, goharvests, without_a_trigger, dropped])
@pytest.mark.parametrize("changed", [{}, {"delivery": "at-least-once"}])
def test_what_it_prints_does_what_a_migration_does(
    unmigrated: Settings, twin: Settings, before: Callable[[Settings], None], changed: dict[str, str]
) -> None:
    by_hand, by_us = unmigrated.model_copy(update=changed), twin.model_copy(update=changed)
    before(unmigrated)
    before(twin)
    was = schema(by_hand)
    script = migration_sql(by_hand)
    assert schema(by_hand) == was
    done = run_with_psql(by_hand, script)
    assert (done.returncode, done.stderr) == (0, "")
    migrate(by_us)
    assert schema(by_hand) == schema(by_us)
    assert migrate(by_hand) == []
    assert migration_sql(by_hand) == "-- outbox is up to date"
    with psycopg.connect(by_hand.dsn.get_secret_value()) as connection:
        Outbox().emit(connection, Event(topic="orders", key="1", value={}))
        rows = connection.execute(
            "SELECT count(*) FROM outbox_identity JOIN outbox_secret USING (table_name)"
        ).fetchone()
    assert rows == (1,)


@pytest.mark.parametrize("wake_up", [True, False])
def test_the_trigger_that_wakes_harvesters(unmigrated: Settings, twin: Settings, wake_up: bool) -> None:
    for settings in (unmigrated, twin):
        migrate(settings, wake_up=not wake_up)
    with psycopg.connect(unmigrated.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(migration_sql(unmigrated, wake_up=wake_up))
    migrate(twin, wake_up=wake_up)
    assert ("TRIGGER outbox_wake_up" in schema(unmigrated)) is wake_up
    assert schema(unmigrated) == schema(twin)


def test_the_trigger_that_wakes_harvesters_of_an_outbox_that_is_new(unmigrated: Settings, twin: Settings) -> None:
    execute(unmigrated, migration_sql(unmigrated, wake_up=True))
    migrate(twin, wake_up=True)
    assert "TRIGGER outbox_wake_up" in schema(twin)
    assert schema(unmigrated) == schema(twin)


def test_the_command_prints_and_changes_nothing(unmigrated: Settings) -> None:
    was = schema(unmigrated)
    done = run_outbox("migrate", "--sql", env=environment(unmigrated))
    assert (done.returncode, done.stderr) == (0, "")
    database = conninfo_to_dict(unmigrated.dsn.get_secret_value())["dbname"]
    assert done.stdout.startswith(f"-- Migrates outbox in the database {database}: 0001_pre_outbox, ")
    assert done.stdout.endswith("COMMIT;\n")
    assert schema(unmigrated) == was
    execute(unmigrated, done.stdout)
    assert run_outbox("migrate", "--sql", env=environment(unmigrated)).stdout == "-- outbox is up to date\n"


def test_what_was_printed_before_somebody_else_migrated_changes_nothing(unmigrated: Settings) -> None:
    script = migration_sql(unmigrated)
    migrate(unmigrated)
    was = schema(unmigrated)
    assert "duplicate key" in run_with_psql(unmigrated, script).stderr
    assert schema(unmigrated) == was


def test_a_role_that_may_only_look_can_print_it(unmigrated: Settings) -> None:
    """And what it prints is refused where it may not run it."""
    execute(unmigrated, "CREATE ROLE only_looks LOGIN PASSWORD 'x'")
    try:
        given = make_conninfo(unmigrated.dsn.get_secret_value(), user="only_looks", password="x")
        looking = unmigrated.model_copy(update={"dsn": SecretStr(given)})
        script = migration_sql(looking)
        assert "permission denied" in run_with_psql(looking, script).stderr
        assert run_with_psql(unmigrated, script).returncode == 0
    finally:
        execute(unmigrated, "DROP ROLE only_looks")


def test_what_a_stranger_makes_after_it_was_printed_is_refused_before_it_runs_code_of_theirs(
    unmigrated: Settings,
) -> None:
    script = migration_sql(unmigrated)
    execute(unmigrated, "CREATE ROLE stranger")
    try:
        execute(
            unmigrated,
            "CREATE TABLE outbox_migration (table_name TEXT, name TEXT, applied_at TIMESTAMPTZ DEFAULT now());"
            "CREATE FUNCTION trap() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'a trap has run as %', current_user; END $$;"
            "CREATE TRIGGER trap AFTER DELETE ON outbox_migration EXECUTE FUNCTION trap();"
            "ALTER TABLE outbox_migration OWNER TO stranger",
        )
        assert "the table outbox_migration belongs to the role stranger" in run_with_psql(unmigrated, script).stderr
    finally:
        execute(unmigrated, "DROP TABLE outbox_migration; DROP ROLE stranger")


def test_who_may_not_make_a_schema_migrates_without_one(unmigrated: Settings) -> None:
    """The schema for Spark's staging tables is not needed by all."""
    execute(unmigrated, "CREATE ROLE owns LOGIN PASSWORD 'x'; CREATE SCHEMA sales AUTHORIZATION owns")
    try:
        given = make_conninfo(unmigrated.dsn.get_secret_value(), user="owns", password="x")
        owning = unmigrated.model_copy(update={"dsn": SecretStr(given), "table": "sales.outbox"})
        assert run_with_psql(owning, migration_sql(owning)).stderr == ""
        assert migration_sql(owning) == "-- sales.outbox is up to date"
        assert "CREATE SCHEMA outbox_staging" not in schema(unmigrated)
    finally:
        execute(unmigrated, "DROP OWNED BY owns; DROP ROLE owns")


def test_two_outboxes_of_a_database_are_printed_at_once(unmigrated: Settings, twin: Settings) -> None:
    tables = [{"table": f"{name}.outbox"} for name in ("sales", "stock")]
    for settings in (unmigrated, twin):
        execute(settings, "CREATE SCHEMA sales; CREATE SCHEMA stock")
    scripts = [migration_sql(unmigrated.model_copy(update=each)) for each in tables]
    assert run_with_psql(unmigrated, "\n".join(scripts)).stderr == ""
    for each in tables:
        migrate(twin.model_copy(update=each))
    assert schema(unmigrated).partition("[(")[0] == schema(twin).partition("[(")[0]


def test_a_table_in_another_schema_with_a_long_name(unmigrated: Settings, twin: Settings) -> None:
    for settings in (unmigrated, twin):
        execute(settings, 'CREATE SCHEMA "Sales"')
    named = {"table": "Sales.Out$box"}
    assert run_with_psql(unmigrated, migration_sql(unmigrated.model_copy(update=named))).stderr == ""
    migrate(twin.model_copy(update=named))
    assert schema(unmigrated) == schema(twin)


def test_it_refuses_what_a_migration_refuses(settings: Settings) -> None:
    with pytest.raises(InvalidSetting, match="is known as 'outbox'"):
        migration_sql(settings.model_copy(update={"table": "public.outbox"}))
    execute(settings, "CREATE ROLE stranger")
    try:
        execute(settings, "ALTER TABLE outbox_job OWNER TO stranger")
        with pytest.raises(ServerRefused, match="the table outbox_job belongs to the role stranger"):
            migration_sql(settings)
    finally:
        execute(settings, "ALTER TABLE outbox_job OWNER TO CURRENT_USER; DROP ROLE stranger")
