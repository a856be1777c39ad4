"""The plugin in Dagster: the daemon's life, the sensor's tick, and checks that pass and fail."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka import Producer
from dagster import (
    AssetCheckSeverity,
    AssetKey,
    AssetSpec,
    DagsterInstance,
    Definitions,
    MaterializeResult,
    Shape,
    asset,
)
from psycopg.conninfo import conninfo_to_dict
from pydantic import SecretStr

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.dagster import OutboxResource, build_outbox_checks
from outbox_plugin.dagster.daemon import LOG_BYTES, Daemon
from outbox_plugin.dagster.daemon_supervision import DaemonAction
from outbox_plugin.status.reader import read_status
from tests.dagster_support import HARVESTER, Ticks, daemons, reported, resources
from tests.harvesting import backlog, create_topic, drained, insert_numbered
from tests.records_to_verify import ALL, EVENTS, Planted, plant
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

CHECKOUT = Path(__file__).resolve().parents[2]


def test_ticks_that_race_start_one_daemon(daemon: Daemon, settings: Settings) -> None:
    now = time.time()
    with ThreadPoolExecutor(8) as ticks:
        list(ticks.map(lambda _: Daemon.of(settings).keep_alive(60.0, now), range(8)))
    eventually(lambda: daemon.running, 30)
    eventually(lambda: len(daemons(daemon)) == 1, 30)
    assert daemon.keep_alive(60.0, now + 100) is DaemonAction.LEAVE
    assert daemons(daemon) == [daemon.pid]


def test_a_killed_daemon_is_replaced(daemon: Daemon, settings: Settings, group: str) -> None:
    now = time.time()
    assert daemon.keep_alive(60.0, now) is DaemonAction.START
    eventually(lambda: daemon.pid, 30)
    first = daemon.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not daemon.running, 10)
    assert daemon.keep_alive(60.0, now + 1) is DaemonAction.WAIT
    assert daemon.keep_alive(60.0, now + 10) is DaemonAction.START
    eventually(lambda: daemon.pid not in (None, first), 30)
    insert_numbered(settings, create_topic(settings, f"{group}-events"), 0, 100)
    drained(settings)


def renewed(daemon: Daemon) -> Daemon:
    """The daemon, with its lease as after another tick: on a busy machine, a short one runs out while it starts."""
    daemon.lease.touch()
    return daemon


def test_a_daemon_whose_lease_runs_out_hands_over_and_ends(daemon: Daemon) -> None:
    daemon.keep_alive(3.0, time.time())
    eventually(lambda: renewed(daemon).log.exists() and "leading as" in daemon.log.read_text(), 30)
    eventually(lambda: not daemon.running, 30)
    log = daemon.log.read_text()
    assert log.index("the lease has run out") < log.index("handed over")
    assert "Traceback" not in log


def test_a_daemon_that_is_terminated_hands_over(daemon: Daemon) -> None:
    """As where a service manager ends all processes of Dagster, or an operator one of them."""
    daemon.keep_alive(60.0, time.time())
    eventually(lambda: daemon.log.exists() and "leading as" in daemon.log.read_text(), 30)
    assert daemon.pid is not None
    os.kill(daemon.pid, signal.SIGTERM)
    eventually(lambda: not daemon.running, 30)
    assert "handed over" in daemon.log.read_text()
    assert daemon.keep_alive(60.0, time.time()) is DaemonAction.START  # It ended as it should: nobody waits.


def test_a_shorter_lease_counts_for_the_daemon_that_runs(daemon: Daemon) -> None:
    """Otherwise it would outlive the code location by the lease that it was started with."""
    daemon.keep_alive(86_400.0, time.time())
    eventually(lambda: daemon.log.exists() and "leading as" in daemon.log.read_text(), 30)
    assert daemon.keep_alive(1.0, time.time()) is DaemonAction.LEAVE
    eventually(lambda: not daemon.running, 30)
    assert "the lease has run out" in daemon.log.read_text()


def test_a_daemon_whose_folder_was_removed_makes_room_for_the_next(daemon: Daemon) -> None:
    """Stopped, it does not see that the folder is missing, but only the one that the next tick makes."""
    daemon.keep_alive(60.0, time.time())
    eventually(lambda: daemon.log.exists() and "leading as" in daemon.log.read_text(), 30)
    [first] = [psutil.Process(pid) for pid in daemons(daemon)]
    first.suspend()
    try:
        shutil.rmtree(daemon.folder)
        assert daemon.keep_alive(60.0, time.time()) is DaemonAction.START
        eventually(lambda: daemon.pid not in (None, first.pid), 30)
    finally:
        first.resume()
    second = daemon.pid
    eventually(lambda: daemons(daemon) == [second], 30)
    assert daemon.lease.exists()
    assert daemon.keep_alive(60.0, time.time()) is DaemonAction.LEAVE


def outputs(daemon: Daemon) -> list[Path]:
    """Standard output and standard error of its process."""
    return [Path(f"/proc/{daemon.pid}/fd/{number}") for number in (1, 2)]


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_log_of_a_daemon_that_runs_is_bounded(daemon: Daemon, form: str) -> None:
    """The log is nearly full when it starts: it begins a new one by itself, and writes to nothing but that."""
    logged = Daemon.of(daemon.settings.model_copy(update={"log_format": form}))
    logged.folder.mkdir(parents=True, exist_ok=True)
    logged.log.write_bytes(b"x" * (LOG_BYTES - 10) + b"\n")
    older = logged.log.with_name("harvester.log.1")
    logged.keep_alive(3.0, time.time())
    eventually(lambda: renewed(logged).log.exists() and older.exists() and "leading as" in logged.log.read_text(), 30)
    eventually(lambda: {output.resolve() for output in outputs(renewed(logged))} == {logged.log.resolve()}, 30)
    eventually(lambda: not logged.running, 30)
    assert older.stat().st_size >= LOG_BYTES - 9
    assert logged.log.stat().st_size < 10_000
    lines = logged.log.read_text().splitlines()
    assert any("the lease has run out" in line for line in lines)
    assert all(line.startswith("{") == (form == "json") for line in lines)


def test_the_daemon_outlives_the_process_that_started_it(daemon: Daemon, settings: Settings) -> None:
    """As when a code location is restarted: the next one finds it, and starts no other."""
    script = "import sys, time; from outbox_plugin.dagster.daemon import Daemon; from outbox_plugin import Settings\n"
    script += "print(Daemon.of(Settings()).keep_alive(60.0, time.time()).name)"
    env = {
        **os.environ,
        "OUTBOX_DSN": settings.dsn.get_secret_value(),
        "OUTBOX_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "OUTBOX_GROUP": settings.group,
    }

    def tick() -> str:
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert tick() == "START"
    eventually(lambda: daemon.pid, 30)
    pid = daemon.pid
    assert tick() == "LEAVE"
    assert daemon.pid == pid


def test_a_daemon_finds_files_where_the_code_location_does(
    daemon: Daemon, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a certificate in the project's folder; but it imports none of the modules there."""
    project = tmp_path / "my shop"
    project.mkdir()
    (project / "logging.py").write_text("raise SystemExit('the module of the project')")
    given = conninfo_to_dict(settings.dsn.get_secret_value())
    (project / "services").write_text("\n".join(["[shop]", *(f"{name}={value}" for name, value in given.items())]))
    monkeypatch.chdir(project)
    monkeypatch.setenv("PGSERVICEFILE", "services")
    ours = Daemon.of(settings.model_copy(update={"dsn": SecretStr("service=shop")}))
    try:
        ours.keep_alive(60.0, time.time())
        eventually(lambda: ours.log.exists() and "leading as" in ours.log.read_text(), 30)
    finally:
        ours.release()
        eventually(lambda: not ours.running, 30)


def test_a_daemon_with_other_settings_makes_room_for_ours(daemon: Daemon, settings: Settings) -> None:
    """As when brokers or a password have changed: nobody renews the lease of the old settings any more."""
    before = Daemon.of(settings.model_copy(update={"kafka": {"client.id": "before"}}))
    assert before.folder == daemon.folder
    now = time.time()
    before.keep_alive(3.0, now)
    eventually(lambda: renewed(before).pid, 30)
    old = before.pid
    assert old is not None
    assert (before.outdated, daemon.outdated) == (False, True)

    def replaced() -> bool:
        daemon.keep_alive(60.0, time.time())
        return daemon.running and not daemon.outdated and daemon.pid not in (None, old)

    eventually(replaced, 30)
    assert daemons(daemon) == [daemon.pid]


def test_a_daemon_that_ended_as_it_should_is_started_again_at_once(daemon: Daemon) -> None:
    daemon.keep_alive(1.0, time.time())
    eventually(lambda: renewed(daemon).pid, 30)
    eventually(lambda: not daemon.running, 30)
    assert daemon.keep_alive(60.0, time.time()) is DaemonAction.START


def test_a_password_is_not_in_the_arguments_of_the_daemon(daemon: Daemon) -> None:
    daemon.keep_alive(60.0, time.time())
    eventually(lambda: daemon.pid, 30)
    assert daemon.pid is not None
    assert not [part for part in psutil.Process(daemon.pid).cmdline() if "postgresql://" in part]


def test_a_tick_starts_the_daemon_and_reports_what_the_ui_plots(daemon: Daemon, settings: Settings, group: str) -> None:
    reported(settings)
    eventually(lambda: "leading as" in (daemon.log.read_text() if daemon.log.exists() else ""), 30)
    insert_numbered(settings, create_topic(settings, f"{group}-events"), 0, 100)
    drained(settings)

    def healthy() -> bool:
        observation, check = reported(settings)
        shown = {name: value.value for name, value in observation.metadata.items()}
        return check.passed and shown["published"] == 100 and shown["backlog"] == 0

    eventually(healthy, 30)
    observation, _ = reported(settings)
    assert {"lag_seconds", "records_per_second", "leaders", "shards", "log", "daemon_pid"} <= set(
        observation.metadata or {}
    )


def test_a_tick_with_unreachable_servers_ends_soon_and_says_so(daemon: Daemon, settings: Settings) -> None:
    """One server takes the connection and never says a word; the other one's port is closed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = SecretStr(f"postgresql://127.0.0.1:{silent.getsockname()[1]}/shop")
        away = settings.model_copy(update={"dsn": dsn, "bootstrap_servers": "127.0.0.1:1"})
        ticks = Ticks(resources(away)[1])
        _, check = ticks.tick()
        assert ticks.seconds < 2.0 * PATIENCE
    assert check.passed is False
    explanation = str(check.metadata["explanation"].value)
    assert "Postgres did not answer in time" in explanation
    assert "Kafka" in explanation
    Daemon.of(away).release()
    eventually(lambda: not Daemon.of(away).running, 30)


def test_ticks_leave_nothing_behind_while_the_table_is_locked(daemon: Daemon, settings: Settings) -> None:
    def waiting() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "outbox-status"]

    with psycopg.connect(settings.dsn.get_secret_value()) as other:
        other.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        _, check = reported(settings)
        assert not check.passed
        eventually(lambda: not waiting(), 5)


def checks_of(settings: Settings, topic: str, *, emit: int, drain_seconds: float = 30.0) -> dict[str, tuple[bool, str]]:
    """Materialize an asset that emits, and run its checks as Dagster does: name -> (passed, explanation)."""
    outbox, harvester = resources(settings)

    @asset
    def emitter() -> MaterializeResult[None]:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            events = (Event(topic=topic, key=f"k{number % 3}", value=number) for number in range(emit))
            Outbox().emit_many(connection, events)
        return MaterializeResult()

    checks = build_outbox_checks(emitter.key, topics=[topic], harvester=HARVESTER, drain_seconds=drain_seconds)
    definitions = Definitions(
        assets=[emitter, AssetSpec(HARVESTER)],
        asset_checks=checks,
        resources={"outbox": outbox, "harvester": harvester},
    )
    with DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
        return {
            evaluation.check_name: (evaluation.passed, str(evaluation.metadata["explanation"].value))
            for evaluation in result.get_asset_check_evaluations()
        }


def test_checks_pass_when_all_is_well(daemon: Daemon, settings: Settings, group: str) -> None:
    topic = create_topic(settings, f"{group}-events")
    daemon.keep_alive(60.0, time.time())
    eventually(lambda: read_status(settings).shards[0].leader, 30)
    found = checks_of(settings, topic, emit=50)
    assert {name: passed for name, (passed, _) in found.items()} == {
        "outbox_drained": True,
        "events_exactly_once": True,
        "events_in_order": True,
        "healthy": True,
        "no_dead_letters": True,
    }
    assert "50 records, each once" in found["events_exactly_once"][1]


def test_checks_fail_when_nothing_harvests(settings: Settings, group: str) -> None:
    topic = create_topic(settings, f"{group}-events")
    found = checks_of(settings, topic, emit=50, drain_seconds=1.0)
    assert found["outbox_drained"] == (False, found["outbox_drained"][1])
    assert "50 events still wait after 1 s: shard 0 has no leader" in found["outbox_drained"][1]
    assert found["healthy"][0] is False
    assert backlog(settings) == 50


def test_the_order_check_says_what_it_could_not_judge(daemon: Daemon, settings: Settings, group: str) -> None:
    topic = create_topic(settings, f"{group}-events")
    daemon.keep_alive(60.0, time.time())
    passed, explanation = checks_of(settings, topic, emit=5)["events_in_order"]
    assert passed
    missing = "outbox-sequence, which only events of Spark's jobs have"
    assert explanation == f"5 records carry no {missing}: their order is not judged"


def test_the_order_check_fails_where_there_is_no_such_topic(settings: Settings, group: str) -> None:
    passed, explanation = checks_of(settings, f"{group}-misspelt", emit=0, drain_seconds=1.0)["events_in_order"]
    assert not passed
    assert f"the topic {group}-misspelt cannot be read" in explanation


def test_a_replay_fails_no_check(settings: Settings, group: str) -> None:
    """Otherwise the checks would fail for as long as the topic keeps it."""
    topic = create_topic(settings, f"{group}-events")
    plant(settings, topic, [*ALL, *(Planted(place, replayed=True) for place in (7, 7, 8))])
    found = checks_of(settings, topic, emit=0, drain_seconds=1.0)
    replayed = "emitted again by a replay (outbox-replay), and not judged: 3"
    assert found["events_exactly_once"] == (True, f"{EVENTS} records, each once; {replayed}")
    assert found["events_in_order"] == (True, f"{EVENTS} records, each key's in order; {replayed}")


def test_a_topic_that_is_too_large_for_one_process_is_not_read(
    settings: Settings, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take gigabytes of the run's memory."""
    monkeypatch.setattr("outbox_plugin.dagster.checks.MAX_RECORDS", EVENTS - 1)
    topic = create_topic(settings, f"{group}-events")
    plant(settings, topic, ALL)
    found = checks_of(settings, topic, emit=0, drain_seconds=1.0)
    for name in ("events_exactly_once", "events_in_order"):
        passed, explanation = found[name]
        assert not passed
        assert explanation.startswith(f"nothing was judged: {topic} may hold 60")
        assert explanation.endswith("name a SparkResource by spark_resource_key, which reads any number")


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_repeated_record_is_as_severe_as_what_was_promised(
    settings: Settings, group: str, delivery: Delivery
) -> None:
    topic = create_topic(settings, f"{group}-events")
    plant(settings, topic, [*ALL, Planted(7)])
    outbox = resources(settings)[0]
    [_, reads_topic] = build_outbox_checks(AssetKey("emitter"), topics=[topic], drain_seconds=1.0)
    with pytest.MonkeyPatch.context() as patch, DagsterInstance.ephemeral() as instance:
        patch.setenv("OUTBOX_DELIVERY", delivery)
        job = Definitions(
            asset_checks=[reads_topic], resources={"outbox": outbox}
        ).resolve_implicit_global_asset_job_def()
        evaluations = job.execute_in_process(instance=instance).get_asset_check_evaluations()
    [repeated] = [each for each in evaluations if each.check_name == "events_exactly_once"]
    assert not repeated.passed
    severe = delivery == "exactly-once"
    assert repeated.severity is (AssetCheckSeverity.ERROR if severe else AssetCheckSeverity.WARN)
    told = "emitted an event twice by one idempotency-key" if severe else "repeats records after a failure"
    assert told in str(repeated.metadata["what_to_do"].value)
    assert "missing" not in repeated.metadata  # Nothing has looked for them.


def test_the_order_check_finds_what_somebody_else_wrote_to_the_topic(settings: Settings, group: str) -> None:
    topic = create_topic(settings, f"{group}-events", partitions=1)
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for sequence, event in (("2", "a"), ("1", "b"), ("3", "c"), ("3", "c")):
        headers: list[tuple[str, str | bytes | None]] = [
            ("outbox-job", "j"),
            ("outbox-sequence", sequence),
            ("idempotency-key", event),
        ]
        producer.produce(topic, "v", "k", headers=headers)
    assert producer.flush(20) == 0
    producer.close()
    found = checks_of(settings, topic, emit=0, drain_seconds=1.0)
    assert [found[check][0] for check in ("events_exactly_once", "events_in_order")] == [False, False]
    assert "1 events came twice (such as c at" in found["events_exactly_once"][1]
    assert "1 events came out of order (such as key k at" in found["events_in_order"][1]


def test_the_reference_location_loads_as_the_ui_would_load_it(settings: Settings) -> None:
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-w", "workspace.yaml"]
    env = {
        **os.environ,
        "OUTBOX_DSN": settings.dsn.get_secret_value(),
        "OUTBOX_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
    }
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "All code locations passed validation" in done.stderr + done.stdout


def test_secrets_are_not_shown_in_the_ui_even_when_they_are_written_out() -> None:
    shape = OutboxResource.to_config_schema().as_field().config_type
    assert isinstance(shape, Shape)
    fields = shape.fields
    assert {name for name, field in fields.items() if field.is_secret} == {"dsn", "kafka"}


def test_what_the_resource_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the command line and the plugin mean the same outbox."""
    monkeypatch.setenv("OUTBOX_TABLE", "app.outbox")
    monkeypatch.setenv("OUTBOX_GROUP", "theirs")
    monkeypatch.setenv("OUTBOX_KAFKA", '{"security.protocol": "ssl"}')
    found = OutboxResource(dsn="postgresql://db/shop", bootstrap_servers="kafka:9092", group="ours").settings()
    assert (found.table, found.group, found.kafka) == ("app.outbox", "ours", {"security.protocol": "ssl"})


def test_a_wrong_setting_is_said_in_one_line(settings: Settings) -> None:
    from outbox_plugin.errors import InvalidSetting

    with pytest.raises(InvalidSetting, match="OUTBOX_DSN: not a Postgres URI"):
        OutboxResource(dsn="nowhere at all", bootstrap_servers="kafka:9092").settings()
    outbox, harvester = resources(settings)
    assert "postgresql://" not in repr(outbox) + repr(harvester)
