"""PgBouncer in transaction mode between everything and Postgres, under load and faults; every row is counted."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.bench.proxy import Proxy
from outbox_plugin.bench.replication import with_port
from outbox_plugin.bench.temporary_outbox import temporary_outbox
from outbox_plugin.bench.writer import Mix
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.guard import UNPRIVILEGED_USER
from outbox_plugin.embedded.server import GuardedServer, accepts_connections
from outbox_plugin.embedded.stack import EmbeddedStack
from outbox_plugin.schema.connection import connect
from tests.chaos.loading import load
from tests.support import PATIENCE

PGBOUNCER = shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin") or shutil.which(
    "pgbouncer"
)
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.long,
    pytest.mark.skipif(PGBOUNCER is None, reason="needs pgbouncer on the PATH (Debian: apt-get install pgbouncer)"),
]

CONFIGURATION = """[databases]
{database} = host=127.0.0.1 port={postgres} user={user}{password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 20
max_client_conn = 200
server_login_retry = 0.2
ignore_startup_parameters = extra_float_digits,options
"""


class PgBouncer:
    """PgBouncer in front of a Postgres, which can be killed and started again."""

    def __init__(self, dsn: str, folder: Path) -> None:
        parts = urlsplit(dsn)
        self.port = free_port()
        self._folder = folder
        self._file = folder / "pgbouncer.ini"
        self._file.touch(mode=0o600)
        if os.geteuid() == 0:  # PgBouncer refuses to be root.
            user = pwd.getpwnam(UNPRIVILEGED_USER)
            os.chown(folder, user.pw_uid, user.pw_gid)
            os.chown(self._file, user.pw_uid, user.pw_gid)
        self._file.write_text(
            CONFIGURATION.format(
                postgres=parts.port,
                database=parts.path.removeprefix("/"),
                port=self.port,
                user=unquote(parts.username or "postgres"),
                password=f" password='{unquote(parts.password)}'" if parts.password else "",
            )
        )

    def start(self) -> None:
        self._server = GuardedServer(
            "PgBouncer",
            [str(PGBOUNCER), "/proc/self/cwd/pgbouncer.ini" if os.geteuid() == 0 else str(self._file)],
            self._folder / "pgbouncer.log",
            stop_signal="SIGINT",
            as_nobody_in=self._folder if os.geteuid() == 0 else None,
        )
        self._server.wait_until(lambda: accepts_connections(self.port))

    def kill(self) -> None:
        self._server.kill()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStack]:
    """A Postgres and a Kafka which this module may kill."""
    stack = EmbeddedStack(tmp_path_factory.mktemp("pooled"))
    stack.start()
    yield stack
    stack.stop()


@pytest.fixture
def bouncer(own_servers: EmbeddedStack, tmp_path: Path) -> Iterator[PgBouncer]:
    folder = tmp_path / "pgbouncer"
    folder.mkdir(mode=0o700)
    bouncer = PgBouncer(own_servers.postgres.dsn, folder)
    bouncer.start()
    yield bouncer
    bouncer.stop()


@pytest.fixture(params=["exactly-once", "at-least-once"])
def settings(own_servers: EmbeddedStack, bouncer: PgBouncer, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """Settings that reach Postgres through PgBouncer only; also migrated through it."""
    dsn = with_port(own_servers.postgres.dsn, bouncer.port)
    pooled = Settings(dsn=dsn, bootstrap_servers=own_servers.kafka.bootstrap_servers, delivery=request.param)
    with temporary_outbox(pooled) as settings:
        yield settings


def test_the_pool_is_in_transaction_mode(settings: Settings) -> None:
    """What this module rests on: a session keeps nothing from one transaction to the next that is its own."""
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as one, psycopg.connect(dsn, autocommit=True) as another:
        one.execute("SET work_mem = '12345kB'")
        assert another.execute("SHOW work_mem").fetchone() == ("12345kB",)


def test_leaders_are_killed_behind_a_pooler(settings: Settings, tmp_path: Path) -> None:
    with load(settings, tmp_path, Mix(rows_per_second=1_500)) as running:
        for _ in range(5):
            running.fleet.kill(running.leader())
            running.flows()


def test_the_pooler_is_killed(settings: Settings, bouncer: PgBouncer, tmp_path: Path) -> None:
    with load(settings, tmp_path, Mix(rows_per_second=1_500)) as running:
        for _ in range(3):
            bouncer.kill()
            bouncer.start()
            running.flows()


def test_postgres_is_stopped_behind_a_pooler(own_servers: EmbeddedStack, settings: Settings, tmp_path: Path) -> None:
    with load(settings, tmp_path, Mix(rows_per_second=1_500)) as running:
        for _ in range(3):
            own_servers.postgres.stop_immediately()
            own_servers.postgres.launch()
            own_servers.postgres.wait()
            running.flows()


@pytest.fixture
def proxy(own_servers: EmbeddedStack) -> Iterator[Proxy]:
    """The way from the pooler to Postgres."""
    with Proxy(own_servers.postgres.port) as proxy:
        yield proxy


@pytest.fixture
def pooled(own_servers: EmbeddedStack, proxy: Proxy, tmp_path: Path) -> Iterator[Settings]:
    """Settings that reach Postgres through PgBouncer, and PgBouncer through the proxy."""
    folder = tmp_path / "pooled"
    folder.mkdir(mode=0o700)
    bouncer = PgBouncer(with_port(own_servers.postgres.dsn, proxy.port), folder)
    bouncer.start()
    dsn = with_port(own_servers.postgres.dsn, bouncer.port)
    yield Settings(dsn=dsn, bootstrap_servers=own_servers.kafka.bootstrap_servers)
    bouncer.stop()


def test_a_connection_that_is_half_open_behind_the_pooler_is_given_up(pooled: Settings, proxy: Proxy) -> None:
    """The pooler answers, and so does Postgres to whom the pooler connects anew."""
    with closing(connect(pooled, own_name=True)) as connection:
        connection.execute("SELECT 1")
        proxy.half_open()
        began = time.monotonic()
        with pytest.raises(psycopg.OperationalError, match="does not answer"):
            connection.execute("SELECT 1")
        assert time.monotonic() - began < 4.0 * PATIENCE


def test_a_statement_behind_the_pooler_that_the_server_works_on_is_waited_for(pooled: Settings) -> None:
    with closing(connect(pooled, own_name=True)) as connection, psycopg.connect(pooled.dsn.get_secret_value()) as other:
        connection.execute("SELECT 1")
        other.execute("SELECT 1")
        connection.execute("SELECT pg_sleep(4)")
