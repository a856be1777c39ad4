"""The daemon's table of faults: what is killed or stopped under `dagster dev`, and how many daemons are alive later.

`pytest tests/chaos/test_daemon_faults.py` prints the table. Two code locations declare one outbox throughout, and there
is no Java on the PATH.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import requests

from outbox_plugin import Settings
from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.embedded.free_ports import free_port
from tests.dagster_support import daemons
from tests.harvesting import create_topic, drained, environment, insert_numbered
from tests.processes import command_of, kill
from tests.support import PATIENCE, eventually

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(900)]

LEASE_SECONDS, SETTLE_SECONDS, START_SECONDS = 15, 30, 300
LOCATION = f"""
import time
from pathlib import Path

from dagster import DefaultSensorStatus, Definitions, EnvVar, sensor

from outbox_plugin.dagster import HarvesterResource, OutboxResource, build_outbox_definitions

outbox = OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))
harvester = HarvesterResource(outbox=outbox, lease_seconds={LEASE_SECONDS})

@sensor(job_name="outbox_pause", minimum_interval_seconds=1, default_status=DefaultSensorStatus.RUNNING)
def hangs():
    while Path("stuck").exists():
        time.sleep(0.1)


definitions = Definitions.merge(
    build_outbox_definitions(harvester, [], interval_seconds=1), Definitions(sensors=[hangs])
)
"""
SENSORS = """{ workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError { ... on RepositoryLocation {
  name repositories { name sensors { name sensorState { id selectorId status } } } } } } } } }"""
STOP = "mutation ($id: String!) { stopSensor(id: $id) { __typename } }"
RELOAD = "mutation ($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) { __typename } }"
START = "mutation ($of: SensorSelector!) { startSensor(sensorSelector: $of) { __typename } }"


@dataclass
class DagsterDev:
    """`dagster dev` with two code locations, and the processes that it consists of."""

    settings: Settings
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    selectors: list[tuple[dict[str, str], str]] = field(default_factory=list)

    def start(self) -> None:
        """Start it, and wait until its sensors have started a daemon that leads."""
        self.port = free_port()
        command = ["-m", "dagster", "dev", "-f", "one.py", "-f", "two.py", "-h", "127.0.0.1", "-p", str(self.port)]
        with (self.folder / "dagster.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=self.folder, env=self.environment(), stdout=log, stderr=log
            )
        eventually(lambda: len(self.alive()) == 1 and self.answers(), START_SECONDS)
        self.selectors = self.sensors()

    def environment(self) -> dict[str, str]:
        bare = str(Path(sys.executable).parent)
        assert shutil.which("java", path=bare) is None
        given = {
            name: value
            for name, value in environment(self.settings).items()
            if name.startswith("OUTBOX_") or name in ("LANG", "HOME", "XDG_STATE_HOME")
        }
        return {**given, "PATH": bare, "DAGSTER_HOME": str(self.folder), "PYTHONPATH": ""}

    def parts(self, *words: str) -> list[psutil.Process]:
        """Its processes whose command has all of `words`."""
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with_words = command_of(child)
            if all(word in with_words for word in words) and str(self.daemon.folder) not in with_words:
                found.append(child)
        return found

    @property
    def daemon(self) -> Daemon:
        return Daemon.of(self.settings)

    def code_servers(self) -> list[psutil.Process]:
        """The processes that run the ticks."""
        return self.parts("dagster", "api", "grpc")

    def answers(self) -> bool:
        """Whether the webserver does, and has loaded both locations."""
        try:
            return len(self.sensors()) == 2
        except (requests.RequestException, KeyError):
            return False

    def alive(self) -> list[int]:
        """The daemons."""
        return daemons(self.daemon)

    def ask(self, query: str, **variables: object) -> dict[str, object]:
        url = f"http://127.0.0.1:{self.port}/graphql"
        answer = requests.post(url, json={"query": query, "variables": variables}, timeout=120).json()
        assert "errors" not in answer, answer
        found: dict[str, object] = answer["data"]
        return found

    def sensors(self) -> list[tuple[dict[str, str], str]]:
        """Selector and id of each location's harvester sensor."""
        return [(selector, sensor) for selector, sensor, _ in self._harvester_sensors()]

    def states(self) -> list[tuple[str, str]]:
        """Id and status of each location's harvester sensor."""
        return [(sensor, status) for _, sensor, status in self._harvester_sensors()]

    def _harvester_sensors(self) -> list[tuple[dict[str, str], str, str]]:
        found = []
        for entry in self.ask(SENSORS)["workspaceOrError"]["locationEntries"]:  # type: ignore[index]
            location = entry["locationOrLoadError"]
            for repository in location["repositories"]:
                for sensor in [each for each in repository["sensors"] if each["name"] == "harvester_sensor"]:
                    selector = {
                        "repositoryLocationName": location["name"],
                        "repositoryName": repository["name"],
                        "sensorName": sensor["name"],
                    }
                    found.append((selector, sensor["sensorState"]["id"], sensor["sensorState"]["status"]))
        return found

    def turn_off(self) -> None:
        """Turn its harvester sensors off. A tick that ends just then writes the old state, which turns one on again."""
        for sensor, status in self.states():
            if status != "STOPPED":
                self.ask(STOP, id=sensor)

    def end(self) -> None:
        """Stop it as Ctrl-C does, and whatever is left of it by force."""
        if self.process is None:
            return
        tree = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(90)
        kill([left for left in tree if left.pid not in self.alive()])
        self.process = None


@pytest.fixture
def dev(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DagsterDev]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "dagster"
    folder.mkdir()
    (folder / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    for name in ("one.py", "two.py"):
        (folder / name).write_text(LOCATION)
    dev = DagsterDev(settings, folder)
    try:
        dev.start()
        yield dev
    finally:
        dev.end()
        dev.daemon.release()
        eventually(lambda: not dev.alive(), 30)


Report = Callable[[str, int], None]


@pytest.fixture
def settled(dev: DagsterDev, capsys: pytest.CaptureFixture[str]) -> Report:
    """Wait as long as the table says, print its line, and hold it to what is intended."""

    def settled(fault: str, intended: int) -> None:
        time.sleep(SETTLE_SECONDS * PATIENCE)
        alive = len(dev.alive())
        with capsys.disabled():
            print(f"\n{fault:60} {alive} alive after {SETTLE_SECONDS} s ({intended} intended)")
        assert alive == intended

    return settled


def relays(dev: DagsterDev, name: str) -> None:
    """What is written now, arrives."""
    insert_numbered(dev.settings, create_topic(dev.settings, f"{dev.settings.group}-{name}"), 0, 50)
    drained(dev.settings)


def test_the_daemon_is_killed(dev: DagsterDev, settled: Report) -> None:
    settled("two code locations, one outbox, no Java", 1)
    relays(dev, "first")
    [pid] = dev.alive()
    os.kill(pid, signal.SIGKILL)
    settled("kill -9 of the daemon", 1)
    relays(dev, "second")
    [replaced] = dev.alive()
    assert replaced != pid


def test_the_code_servers_are_killed(dev: DagsterDev, settled: Report) -> None:
    """Dagster loads them again when somebody asks it to; until then nobody asks for the daemon either."""
    servers = dev.code_servers()
    assert len(servers) == 2
    for server in servers:
        server.kill()
    settled("kill -9 of the code servers", 0)
    for selector, _ in dev.selectors:
        dev.ask(RELOAD, name=selector["repositoryLocationName"])
    settled("code locations loaded again", 1)
    relays(dev, "again")


def test_the_sensors_are_turned_off_and_on(dev: DagsterDev, settled: Report) -> None:
    assert len(dev.selectors) == 2

    def ended() -> bool:
        dev.turn_off()
        return not dev.alive()

    eventually(ended, 60)
    settled("sensors off", 0)
    for selector, _ in dev.selectors:
        dev.ask(START, of=selector)
    settled("sensors on again", 1)
    relays(dev, "again")


def test_ticks_are_stuck(dev: DagsterDev, settled: Report) -> None:
    """A sensor of the user's hangs, and with it all of Dagster's: no lease is renewed, so the daemon hands over."""
    (dev.folder / "stuck").touch()
    settled("a stuck tick of another sensor", 0)
    (dev.folder / "stuck").unlink()
    settled("ticks go on", 1)


def test_the_webserver_is_killed(dev: DagsterDev, settled: Report) -> None:
    """`dagster dev` ends with it, as Dagster has it."""
    for server in dev.parts("dagster_webserver"):
        server.kill()
    settled("kill -9 of the webserver", 0)


def test_dagster_dev_is_killed(dev: DagsterDev, settled: Report) -> None:
    assert dev.process is not None
    tree = dev.parts()
    dev.process.kill()
    dev.process.wait(90)
    try:
        eventually(lambda: not dev.alive(), 180)  # Dagster's code servers go on for 45 s before they miss it.
        settled("kill -9 of dagster dev, once its code servers have ended", 0)
    finally:
        kill(tree)  # Its webserver and its daemon, which nobody tells to end.


def test_dagster_dev_ends_by_ctrl_c(dev: DagsterDev, settled: Report) -> None:
    dev.end()
    settled("Ctrl-C of dagster dev", 0)
