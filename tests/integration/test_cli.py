"""The command line as a user meets it: bad input is one clear line and exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from outbox_plugin import Settings
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import backlog, create_topic, drained, environment, harvesters, insert_numbered, run_outbox
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(unmigrated: Settings) -> Settings:
    """Nothing is there yet."""
    return unmigrated


@pytest.fixture
def guarded_role(settings: Settings) -> Iterator[str]:
    """A DSN, with a password in it, of a role that may not log in."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("CREATE ROLE locked_out NOLOGIN PASSWORD 'hunter2'")
        yield make_conninfo(settings.dsn.get_secret_value(), user="locked_out", password="hunter2")
        connection.execute("DROP ROLE locked_out")


def refused(settings: Settings, *command: str, **changed: str) -> str:
    """Run a command that must be refused; its one line."""
    done = run_outbox(*command, env={**environment(settings), **changed})
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("outbox: ")
    assert "hunter2" not in done.stderr
    return lines[0]


def test_an_unreachable_database(settings: Settings) -> None:
    nowhere = f"postgresql://app:hunter2@127.0.0.1:{free_port()}/shop"
    for command in ("harvest", "migrate"):
        assert "Postgres, as OUTBOX_DSN names it: connection" in refused(settings, command, OUTBOX_DSN=nowhere)


@pytest.mark.parametrize("schema", ["information_schema", "pg_catalog", "pg_temp", "pg_toast"])
def test_a_schema_of_postgres_itself_takes_no_outbox(settings: Settings, schema: str) -> None:
    line = refused(settings, "migrate", OUTBOX_TABLE=f"{schema}.outbox")
    assert "information_schema, and those that begin with pg_, are Postgres's own" in line
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        assert connection.execute("SELECT FROM pg_class WHERE relname = 'outbox'").fetchall() == []


def test_an_unreachable_broker(settings: Settings) -> None:
    migrate(settings)
    nowhere = f"127.0.0.1:{free_port()}"
    said = refused(settings, "harvest", OUTBOX_BOOTSTRAP_SERVERS=nowhere)
    assert f"Kafka, as OUTBOX_BOOTSTRAP_SERVERS names it ({nowhere}):" in said
    assert "refused" in said


@pytest.mark.parametrize(
    "command",
    [
        "migrate",
        "migrate --sql",
        "pause",
        "parked release",
        "dead-letters list",
        "replay",
        "inbox list",
        "grants --role harvester --to app",
    ],
)
def test_a_database_that_goes_away_while_a_command_works(settings: Settings, command: str) -> None:
    """It waits for a lock when its session ends. Exit code 2 would say that it asked for what cannot be done."""
    migrate(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as holder:
        tables = holder.execute("SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relname ~ '^outbox'")
        holder.execute(f"LOCK TABLE {', '.join(table for (table,) in tables)} IN ACCESS EXCLUSIVE MODE")
        done = run_outbox_until(lambda: _end_sessions_that_wait(settings), *command.split(), env=environment(settings))
    went = "went away: terminating connection due to administrator command"
    assert done == (1, f"outbox: Postgres, as OUTBOX_DSN names it, {went}\n")


def run_outbox_until(end: Callable[[], int], *command: str, env: dict[str, str]) -> tuple[int, str]:
    """Run a command until `end` has ended its session. Returns its exit code and standard error."""
    running = subprocess.Popen(
        [sys.executable, "-m", "outbox_plugin", *command], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        eventually(end, 60)
        _, said = running.communicate(timeout=60 * PATIENCE)
    finally:
        running.kill()
    return running.returncode, said


def _end_sessions_that_wait(settings: Settings) -> int:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        return connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).rowcount


def test_a_login_that_is_refused(settings: Settings, guarded_role: str) -> None:
    assert 'role "locked_out" is not permitted to log in' in refused(settings, "harvest", OUTBOX_DSN=guarded_role)


def test_a_missing_table(settings: Settings) -> None:
    assert "run `outbox migrate` first" in refused(settings, "harvest")
    migrate(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("DROP TABLE outbox")
    assert "there is no outbox table 'outbox'" in refused(settings, "harvest") or "recreated" in refused(
        settings, "harvest"
    )


def test_a_missing_schema(settings: Settings) -> None:
    """A migration creates none for the outbox, whatever its role may do: a mistyped name makes no outbox."""
    said = 'schema "nowhere" does not exist; create it, then run `outbox migrate`'
    assert said in refused(settings, "migrate", OUTBOX_TABLE="nowhere.outbox")


def test_a_table_without_a_column_that_is_needed(settings: Settings) -> None:
    migrate(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("ALTER TABLE outbox DROP COLUMN kafka_header_values")
    assert "lacks the column(s) kafka_header_values" in refused(settings, "harvest")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"OUTBOX_DSN": "shop at db"}, "OUTBOX_DSN: not a Postgres URI; expected postgresql://"),
        ({"OUTBOX_DELIVERY": "sometimes"}, "'exactly-once' or 'at-least-once' (given: 'sometimes')"),
        ({"OUTBOX_KAFKA": '{"no.such.property": "1"}'}, 'No such configuration property: "no.such.property"'),
        ({"OUTBOX_KAFKA": '{"linger.ms": "soon"}'}, "OUTBOX_KAFKA: Invalid value for configuration property"),
        ({"OUTBOX_KAFKA": '{"acks": "0"}'}, "the property 'acks' cannot be set here"),
        ({"OUTBOX_SHARDS": "none"}, "OUTBOX_SHARDS"),
    ],
)
def test_a_wrong_setting(settings: Settings, changed: dict[str, str], said: str) -> None:
    migrate(settings)
    assert said in refused(settings, "harvest", **changed)


def test_a_command_that_does_not_exist(settings: Settings) -> None:
    assert "No such command 'harvset'" in refused(settings, "harvset")


def test_a_missing_setting(settings: Settings) -> None:
    env = {name: value for name, value in environment(settings).items() if name != "OUTBOX_DSN"}
    done = run_outbox("harvest", env=env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "OUTBOX_DSN is not set" in done.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_harvester_logs_one_event_on_a_line(settings: Settings, group: str, tmp_path: Path, form: str) -> None:
    migrate(settings)
    topic = create_topic(settings, f"{group}-events")
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
            "VALUES (%s, E'k\\x1b[2J\\n2', 'the value', '{a}', '{}')",
            (topic,),
        )
    logged = settings.model_copy(update={"log_format": form})
    with harvesters(logged, tmp_path) as [harvester]:
        eventually(lambda: "header keys" in harvester.log, 60)
        assert harvester.terminate() == 0
        lines = harvester.log.splitlines()
    assert all(line.isprintable() for line in lines)
    assert "the value" not in harvester.log
    if form == "text":
        assert all(re.match(r"\d{4}-\d\d-\d\d [\d:]{8},\d{3} (INFO|WARNING) ", line) for line in lines)
        return
    led, parked, ended = [
        next(event for event in map(json.loads, lines) if said in event["message"])
        for said in ("leading as", "waits", "handed over")
    ]
    assert (led["level"], led["logger"], led["shard"]) == ("INFO", "outbox_plugin.harvester", 0)
    assert led["term"] >= 1
    assert led["leader"] == ended["leader"]
    assert (parked["level"], parked["topic"], parked["key"]) == ("WARNING", topic, "k\x1b[2J\n2")
    assert datetime.fromisoformat(led["timestamp"]) <= datetime.now(UTC)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("log", ["a full disk", "a pipe that nobody reads", "closed"])
def test_a_harvester_whose_log_cannot_be_written_relays_and_hands_over(
    settings: Settings, group: str, form: str, log: str
) -> None:
    migrate(settings)
    topic = create_topic(settings, f"{group}-events")
    read, unread = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    harvest = [sys.executable, "-m", "outbox_plugin", "harvest"]
    harvester = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *harvest] if log == "closed" else harvest,
        env=environment(settings.model_copy(update={"log_format": form})),
        stderr={"a full disk": full, "a pipe that nobody reads": unread}.get(log),
    )
    try:
        insert_numbered(settings, topic, 0, 100)
        eventually(lambda: harvester.poll() is not None or backlog(settings) == 0, 60)
        harvester.terminate()
        assert harvester.wait(60 * PATIENCE) == 0
        assert backlog(settings) == 0
    finally:
        harvester.kill()
        harvester.wait()
        os.close(full)
        os.close(unread)


def test_migrate_twice_and_by_two_at_once(settings: Settings) -> None:
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "outbox_plugin", "migrate"],
            env=environment(settings),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = [command.communicate(timeout=180)[0] for command in commands]
    assert [command.returncode for command in commands] == [0, 0, 0]
    assert sorted("applied to outbox: 0001" in line for line in said) == [False, False, True]
    for options, note in (((), ""), (("--wake-up",), "; writers wake its harvesters")):
        assert run_outbox("migrate", *options, env=environment(settings)).stdout == f"outbox is up to date{note}\n"


def test_status_in_the_form_that_was_promised(settings: Settings, group: str) -> None:
    migrate(settings)
    topic = create_topic(settings, f"{group}-events")
    insert_numbered(settings, topic, 0, 10)
    before = json.loads(run_outbox("status", "--json", env=environment(settings)).stdout)
    assert before["backlog"] == 10
    assert before["oldest_seconds"] >= 0
    assert before["shards"][0] | {"shard": 0, "leader": None, "lag_records": 10} == before["shards"][0]

    harvester = subprocess.Popen([sys.executable, "-m", "outbox_plugin", "harvest"], env=environment(settings))
    try:
        drained(settings)
        eventually(lambda: _leader_pid(settings) == harvester.pid, 30)
        status = json.loads(run_outbox("status", "--json", env=environment(settings)).stdout)
        assert (status["backlog"], status["oldest_seconds"]) == (0, None)
        leader = status["shards"][0]["leader"]
        assert leader["host"] == os.uname().nodename
        assert set(leader) == {"instance", "host", "pid", "leader_id", "since"}
        assert f"pid {harvester.pid}" in run_outbox("status", env=environment(settings)).stdout
        harvester.send_signal(signal.SIGINT)
        assert harvester.wait(90) == 0
    finally:
        harvester.kill()
        harvester.wait()
    assert backlog(settings) == 0


def _leader_pid(settings: Settings) -> int | None:
    status = json.loads(run_outbox("status", "--json", env=environment(settings)).stdout)
    leader = status["shards"][0]["leader"]
    return leader["pid"] if leader else None


def test_status_while_a_server_is_away(settings: Settings) -> None:
    migrate(settings)
    done = run_outbox("status", "--json", env={**environment(settings), "OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"})
    status = json.loads(done.stdout)
    assert done.returncode == 1
    assert status["backlog"] == 0
    assert "Kafka" in status["errors"][0]
