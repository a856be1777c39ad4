"""The quick start, run: a project of Dagster's own making, the wheel, the component, its events in Kafka."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import requests
import yaml

from outbox_plugin import Settings
from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.embedded.free_ports import free_port
from tests.documents import blocks
from tests.harvesting import create_topic, environment
from tests.support import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = Path(sys.executable).parent
TOPIC_SEEN = """{ assetNodes { assetKey { path } assetMaterializations(limit: 1) { timestamp } } }"""


class Project:
    """The project, its virtual environment, and its Dagster home."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder / "shop"
        self.venv = folder / "venv"
        self.home = folder / "home"
        self.settings = settings
        self.port = free_port()
        self.home.mkdir()
        (self.home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        (self.home / ".dg.toml").write_text("[cli.telemetry]\nenabled = false\n")

    def environment(self) -> dict[str, str]:
        return {
            **environment(self.settings),
            "HOME": str(self.home),
            "DAGSTER_HOME": str(self.home),
            "VIRTUAL_ENV": str(self.venv),
            "PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}",
            "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
        }

    def run(self, commands: str) -> str:
        """Run commands as a user types them, which must succeed; what they said.

        `pip` is uv's, with the wheel for what is not published; the servers are the test's, not those of the page.
        """
        pip = f"{quoted(OURS / 'uv')} --quiet pip install --find-links {quoted(self.folder.parent / 'wheels')} "
        ours = re.sub(r"^pip install ", pip, re.sub(r"^export .*\n", "", commands, flags=re.M), flags=re.M)
        where = self.folder if self.folder.exists() else self.folder.parent
        shell = ["bash", "-euc", ours]
        done = subprocess.run(shell, cwd=where, env=self.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{commands}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return done.stdout + done.stderr

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command that stays."""
        program = [str(self.venv / "bin" / command[0]), *command[1:]]
        with (self.home / "dev.log").open("ab") as log:
            return subprocess.Popen(program, cwd=self.folder, env=self.environment(), stdout=log, stderr=log)

    def has_seen_the_topic(self) -> bool:
        """Whether the sensor has seen that the topic moved, so the UI shows it as materialized."""
        url = f"http://127.0.0.1:{self.port}/graphql"
        with suppress(requests.RequestException):
            nodes = requests.post(url, json={"query": TOPIC_SEEN}, timeout=30).json()["data"]["assetNodes"]
            seen = [node for node in nodes if node["assetKey"]["path"] == ["kafka", "orders"]]
            return any(node["assetMaterializations"] for node in seen)
        return False


def quoted(path: Path | str) -> str:
    """A path in a shell's words; a checkout may stand in a folder with a space in its name."""
    return shlex.quote(str(path))


@pytest.fixture
def project(settings: Settings, tmp_path: Path, daemon: Daemon) -> Project:
    """The wheel of this checkout, and an empty virtual environment."""
    project = Project(tmp_path, settings)
    python, wheels = quoted(sys.executable), quoted(tmp_path / "wheels")
    pip = f"{python} -m pip --quiet --disable-pip-version-check"
    project.run(f"{pip} wheel --no-deps --no-build-isolation --wheel-dir {wheels} {quoted(CHECKOUT)}")
    project.run(f"{quoted(OURS / 'uv')} --quiet venv --python {python} {quoted(project.venv)}")
    return project


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """What runs beside; ended afterwards as Ctrl-C does."""
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for process in running:
        process.send_signal(signal.SIGINT)
        process.wait(180)


def test_the_quick_start_leads_to_events_in_kafka(project: Project, started: list[subprocess.Popen[bytes]]) -> None:
    """Every block of the page, in its order: commands are run, files are written, and `dg dev` runs beside."""
    create_topic(project.settings, "orders")
    said = ""
    for block in blocks("tutorials/dagster-project.md"):
        if block.language == "yaml":
            assert block.file
            assert yaml.safe_load((project.folder / block.file).read_text()) == yaml.safe_load(block.text)
        elif block.file:
            (project.folder / block.file).write_text(block.text)
        elif block.text == "dg dev\n":
            started.append(project.start("dg", "dev", "--host", "127.0.0.1", "--port", str(project.port)))
        else:
            said = project.run(block.text)
    assert said.count("customer-") == 20
    assert str(project.venv) in project.run("python -c 'import outbox_plugin; print(outbox_plugin.__file__)'")
    assert "All code locations passed validation" in project.run("dagster definitions validate -m shop.definitions")
    eventually(project.has_seen_the_topic, 120)
