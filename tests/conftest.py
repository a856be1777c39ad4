"""Fixtures: real servers for the whole run, and for each test a database and a group of its own."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
from tests.harvesting import create_topic
from tests.support import PATIENCE, eventually

# Every run has the same examples, and may take its time. `pytest --hypothesis-profile default` looks for others.
hypothesis_settings.register_profile(
    "gate", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("gate")
RESOURCE_TRACKER = "multiprocessing.resource_tracker"  # Python's own, of whoever has used a pool; it ends with us.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of one long file go first: begun last, it would run alone while the other processes have nothing to do."""
    items.sort(key=lambda item: "/tests/simulation/" not in item.path.as_posix())


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A developer's own OUTBOX_… and libpq variables, and .env file, must not decide a test."""
    for name in [name for name in os.environ if name.startswith(("OUTBOX_", "PG"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """Whom a shell starts in the background ignores SIGINT, and so would all that the tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """The whole run leaves no process and no thread of ours."""
    before = set(threading.enumerate())
    yield
    children = [each for each in psutil.Process().children(recursive=True) if RESOURCE_TRACKER not in told(each)]
    _, running = psutil.wait_procs(children, timeout=20 * PATIENCE)
    assert not [told(each) for each in running]
    left = [each.name for each in threading.enumerate() if each not in before and each.name.startswith("outbox-")]
    assert not left


def told(process: psutil.Process) -> str:
    """What a process that should be gone is, for whoever reads the failure."""
    with suppress(psutil.Error):
        return f"{process.pid} of {process.ppid()}, {process.status()}: {' '.join(process.cmdline())[:300]}"
    return f"{process.pid}"


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, _nothing_is_left_behind: None) -> Iterator[EmbeddedStack]:
    """A Postgres and a Kafka that are running, and can be killed and started again."""
    stack = EmbeddedStack(tmp_path_factory.mktemp("stack with a space"))
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
