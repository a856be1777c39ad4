"""The sensor's tick: what it reports over time, what it leaves alone, and that it never waits for long."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from dagster import AssetCheckEvaluation, AssetCheckSeverity, AssetMaterialization, AssetObservation
from pydantic import SecretStr

from outbox_plugin import Settings
from outbox_plugin.bench import tick as benchmark
from outbox_plugin.dagster import HarvesterResource, Limits, Topic, build_harvester_sensor
from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.status.reader import read_status
from tests.dagster_support import HARVESTER, Ticks, daemons, resources
from tests.harvesting import create_topic, drained, harvesters, insert_numbered
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

STATUS_SECONDS = "outbox_plugin.dagster.sensor.STATUS_SECONDS"


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick waits for servers that answer, however busy the machine is."""
    monkeypatch.setattr(STATUS_SECONDS, 30.0)


def observing(settings: Settings) -> HarvesterResource:
    outbox, _ = resources(settings)
    return HarvesterResource(outbox=outbox, mode="observe")


def explanation(ticks: Ticks) -> str:
    return str(ticks.tick()[1].metadata["explanation"].value)


def test_a_tick_that_only_observes_starts_nothing(daemon: Daemon, settings: Settings) -> None:
    observation, check = Ticks(observing(settings)).tick()
    assert not daemons(daemon)
    assert not daemon.folder.exists()
    assert "log" not in observation.metadata
    assert not check.passed
    assert "outbox harvest" in str(check.metadata["what_to_do"].value)


def test_a_harvester_that_runs_elsewhere_counts(daemon: Daemon, settings: Settings, tmp_path: Path) -> None:
    ticks = Ticks(observing(settings))
    with harvesters(settings, tmp_path / "elsewhere"):
        eventually(lambda: ticks.tick()[1].passed, 30)
    eventually(lambda: not ticks.tick()[1].passed, 30)
    assert not daemons(daemon)


@pytest.mark.usefixtures("_patient")
def test_a_takeover_is_counted_and_what_the_daemon_uses_is_measured(daemon: Daemon, settings: Settings) -> None:
    ticks = Ticks(resources(settings)[1])
    assert explanation(ticks) == "a harvester has just been started; shard 0 has no leader"
    eventually(lambda: ticks.tick()[1].passed, 60)
    observation, _ = ticks.tick()
    assert (observation.metadata["takeovers"].value, observation.metadata["recovered_rows"].value) == (0, 0)
    memory, cpu = (observation.metadata[name].value for name in ("memory_megabytes", "cpu_percent"))
    assert isinstance(memory, float)
    assert 10 < memory < 500
    assert isinstance(cpu, float)
    assert cpu >= 0
    assert observation.metadata["daemon_pid"].value == str(daemon.pid)
    daemon.release()
    eventually(lambda: not daemon.running, 30)
    eventually(lambda: ticks.tick()[1].passed, 60)
    assert ticks.tick()[0].metadata["takeovers"].value == 1


@pytest.mark.usefixtures("_patient")
def test_topics_are_told_of_when_they_move_and_when_they_stop(daemon: Daemon, settings: Settings, group: str) -> None:
    topic = create_topic(settings, f"{group}-events")
    sensor = build_harvester_sensor(HARVESTER, topics=[topic, f"{group}-not-there"])
    ticks = Ticks(resources(settings)[1], sensor)

    def told() -> list[AssetObservation | AssetMaterialization]:
        ticks.tick()
        return [
            event
            for event in ticks.events
            if not isinstance(event, AssetCheckEvaluation) and event.asset_key == Topic(topic).key
        ]

    [first] = told()
    assert (type(first), first.metadata["last_offset"].value) == (AssetObservation, 0)
    assert told() == []
    eventually(lambda: read_status(settings).shards[0].leader, 30)
    insert_numbered(settings, topic, 0, 100)
    drained(settings)
    [moved] = told()
    assert isinstance(moved, AssetMaterialization)
    new, rate = (moved.metadata[name].value for name in ("new_offsets", "offsets_per_second"))
    assert isinstance(new, int)
    assert moved.metadata["dagster/uri"].value == f"kafka://{settings.bootstrap_servers}/{topic}"
    assert new > 100  # The marks that end transactions count too.
    assert isinstance(rate, float)
    assert rate > 0
    [stopped] = told()
    assert (type(stopped), stopped.metadata["new_offsets"].value) == (AssetObservation, 0)
    assert told() == []


@pytest.mark.usefixtures("_patient")
def test_a_lag_is_first_a_warning_and_then_an_error(daemon: Daemon, settings: Settings, group: str) -> None:
    insert_numbered(settings, create_topic(settings, f"{group}-events"), 0, 1)

    def severity(limits: Limits) -> AssetCheckSeverity:
        _, check = Ticks(observing(settings), build_harvester_sensor(HARVESTER, limits=limits)).tick()
        assert not check.passed
        return check.severity

    assert severity(Limits(lag_warn_seconds=0.001, lag_error_seconds=1000)) is AssetCheckSeverity.WARN
    assert severity(Limits(lag_warn_seconds=0.001, lag_error_seconds=0.002)) is AssetCheckSeverity.ERROR


@pytest.mark.slow
@pytest.mark.usefixtures("_patient")
def test_ticks_cost_little_and_leave_nothing_behind(settings: Settings, topic: str) -> None:
    report = benchmark.tick(settings, [topic], 200, print)
    assert report.median_seconds < 0.3 * PATIENCE
    assert report.memory_after - report.memory_before < 5.0
    assert report.threads_after <= report.threads_before


@pytest.mark.parametrize("how", ["closed", "silent", "unroutable name"])
def test_a_tick_with_unreachable_servers_ends_within_two_seconds_and_says_so(
    how: str, daemon: Daemon, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed port refuses at once; a silent one takes the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = {"closed": 1, "silent": silent.getsockname()[1], "unroutable name": 5432}[how]
        host = "nowhere.invalid" if how == "unroutable name" else "127.0.0.1"
        away = settings.model_copy(
            update={"dsn": SecretStr(f"postgresql://{host}:{port}/shop"), "bootstrap_servers": f"{host}:{port}"}
        )
        ticks = Ticks(observing(away), build_harvester_sensor(HARVESTER, topics=["one", "two"]))
        with monkeypatch.context() as impatient:
            impatient.setattr(STATUS_SECONDS, 0.1)
            ticks.tick()
        own = ticks.seconds  # What a tick takes on this machine, as busy as it is, when it hardly waits.
        for _ in range(2):
            _, check = ticks.tick()
            assert ticks.seconds < 2.0 + 4 * own
            assert check.passed is False
            explanation = str(check.metadata["explanation"].value)
            assert "Postgres" in explanation
            assert "Kafka" in explanation
            assert "OUTBOX_DSN" in str(check.metadata["what_to_do"].value)
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "outbox-status"], 10)
