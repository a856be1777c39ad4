"""Fixtures: real servers for the whole run, and for each test a database and a group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from psycopg import sql

from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.embedded.stack import EmbeddedStack, Endpoints
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings
from tests.class_archives import use_archives
from tests.harvesting import create_topic
from tests.memory_folder import memory_folder
from tests.other_servers import use_other_servers
from tests.slow_test_share import in_share, present_share
from tests.support import PATIENCE, begins_with_shared_spark, eventually

# Every run has the same examples, and no deadline. `pytest --hypothesis-profile default` looks for others.
hypothesis_settings.register_profile(
    "gate", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("gate")
use_archives(os.environ)
use_other_servers(os.environ)
RESOURCE_TRACKER = "multiprocessing.resource_tracker"  # Python's own. It ends with us.


LOG_LINES = 40
LEFT_OUT = pytest.StashKey[set[str]]()
CRASHED = pytest.StashKey[list[str]]()
MAKING_ARCHIVES = pytest.StashKey["subprocess.Popen[bytes]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the gate."""
    parser.addoption("--share", action="store_true", help="of the tests marked `slow`, run the commit's share")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the count of the tests that this process leaves out."""
    config.stash[LEFT_OUT] = set()
    config.stash[CRASHED] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other shares, and run the longest files first.

    If a long file began last, it would run alone while the other processes have nothing to do. Files that begin with
    the shared Spark session follow each other, so that each process starts it once.
    """
    if config.getoption("share"):
        _leave_out_other_shares(config, items)
    first: dict[Path, pytest.Item] = {}
    for item in items:
        first.setdefault(item.path, item)
    with_spark = {path for path, item in first.items() if begins_with_shared_spark(item)}
    items.sort(key=lambda item: ("/tests/simulation/" not in item.path.as_posix(), item.path not in with_spark))


def _leave_out_other_shares(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = {item.nodeid for item in items if item.get_closest_marker("slow") and not _runs_seeds_of_the_share(item)}
    left_out = slow - in_share(slow, present_share(config.rootpath))
    config.stash[LEFT_OUT].update(left_out)
    items[:] = [item for item in items if item.nodeid not in left_out]


def _runs_seeds_of_the_share(item: pytest.Item) -> bool:
    return "seeds" in getattr(item, "fixturenames", ())


def pytest_sessionstart(session: pytest.Session) -> None:
    """Make Java's archives in the background: the tests of a whole run that come first start no Java."""
    if session.config.getoption("share") and not hasattr(session.config, "workerinput"):
        making = [sys.executable, "-m", "tests.make_class_archives"]
        session.config.stash[MAKING_ARCHIVES] = subprocess.Popen(
            making,
            cwd=session.config.rootpath,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Wait for the archives. Report the left-out tests to the process that started this one, if one did."""
    if (making := session.config.stash.get(MAKING_ARCHIVES, None)) is not None:
        making.wait()
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        left_out = session.config.stash[LEFT_OUT]
        output["left_out"] = sorted(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Collect the left-out tests of a process that has ended, or how it ended where it has crashed.

    The library of these processes has no types.
    """
    node.config.stash[LEFT_OUT].update(getattr(node, "workeroutput", {}).get("left_out", ()))
    if error is not None:
        code: object = "unknown"
        with suppress(subprocess.TimeoutExpired):  # It may have closed its pipe alone.
            code = node.gateway._io.popen.wait(10)
        memory = psutil.virtual_memory().available // 2**20
        node.config.stash[CRASHED].append(f"{node.gateway.id}: exit code {code}, {memory:,} MiB of memory available")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the processes that have crashed, and the tests that were left out."""
    for line in config.stash[CRASHED]:
        terminalreporter.section(line)
    if left_out := config.stash[LEFT_OUT]:
        terminalreporter.section(f"left out: {len(left_out)} slow tests of other shares; `make test-long` runs them")
        for name in sorted(left_out):
            terminalreporter.write_line(name)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide a developer's own OUTBOX_… and libpq variables, and the .env file, from the tests."""
    for name in [name for name in os.environ if name.startswith(("OUTBOX_", "PG"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """Make SIGINT end the tests. A process that a shell starts in the background ignores it, as do its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Check that the whole run leaves no process and no thread of ours."""
    before = set(threading.enumerate())
    yield
    children = [each for each in psutil.Process().children(recursive=True) if RESOURCE_TRACKER not in described(each)]
    _, running = psutil.wait_procs(children, timeout=20 * PATIENCE)
    assert not [described(each) for each in running]
    left = [each.name for each in threading.enumerate() if each not in before and each.name.startswith("outbox-")]
    assert not left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the servers' logs with a test that fails: they are deleted after the run."""
    report = yield
    servers = getattr(item, "funcargs", {}).get("servers")
    if report.failed and isinstance(servers, EmbeddedStack):
        for log in sorted(servers.folder.glob("*/*.log")):
            lines = log.read_text(errors="replace").splitlines()
            report.sections.append((f"the end of {log.name}", "\n".join(lines[-LOG_LINES:])))
    return report


def described(process: psutil.Process) -> str:
    """Describe a process that should be gone, for the failure message."""
    with suppress(psutil.Error):
        return f"{process.pid} of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())[:300]}"
    return f"{process.pid}"


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, _nothing_is_left_behind: None) -> Iterator[EmbeddedStack]:
    """A Postgres and a Kafka that are running, and can be killed and started again."""
    name = "stack with a space"
    with memory_folder(tmp_path_factory.mktemp(name)) as folder:
        stack = EmbeddedStack(folder / name)
        stack.start()
        yield stack
        stack.stop()


@pytest.fixture(scope="session")
def stack(servers: EmbeddedStack) -> Endpoints:
    """How to reach the servers."""
    return Endpoints(servers.postgres.dsn, servers.kafka.bootstrap_servers)


@pytest.fixture
def dsn(stack: Endpoints) -> Iterator[str]:
    """A database of the test's own, empty."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(stack.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield stack.dsn.rsplit("/", 1)[0] + f"/{name}"
    with psycopg.connect(stack.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def bootstrap_servers(stack: Endpoints) -> str:
    """The brokers."""
    return stack.bootstrap_servers


@pytest.fixture
def group() -> str:
    """A group of the test's own."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def unmigrated(dsn: str, bootstrap_servers: str, group: str) -> Settings:
    """Settings for an empty database."""
    return Settings(dsn=dsn, bootstrap_servers=bootstrap_servers, group=group)


@pytest.fixture
def settings(unmigrated: Settings) -> Settings:
    """Settings for an outbox that is migrated and empty."""
    migrate(unmigrated)
    return unmigrated


@pytest.fixture
def topic(settings: Settings, group: str) -> str:
    """A topic of the test's own, with three partitions."""
    return create_topic(settings, f"{group}-events")


@pytest.fixture
def daemon(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A harvester's daemon with a folder of the test's own; ended afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    daemon = Daemon.of(settings)
    yield daemon
    daemon.release()
    eventually(lambda: not daemon.running, 30)
