"""The harvester as a daemon: at most one per host and outbox. It runs while its lease is renewed.

The daemon's folder holds a lock that the running daemon takes, the lease (a file that each sensor tick touches), the
log, and the times of its starts. The daemon runs in a session of its own, so it outlives the tick and the code server
that started it. When its lease runs out, it hands over leadership and ends.

A lease is for one set of settings and one version of this package. So no tick renews the lease of a daemon with old
settings: it ends, and a new one starts. Two code locations with different settings do not end each other's daemon.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from outbox_plugin import logs
from outbox_plugin.dagster.daemon_supervision import RELEASED, DaemonAction, DaemonState, LeaseClock, decide, recent
from outbox_plugin.dagster.outbox_address import libpq_environment, outbox_address
from outbox_plugin.errors import InvalidSetting, OutboxError
from outbox_plugin.harvester import Harvester, look_for_cycles_less_often
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings
from outbox_plugin.threads.signals import stop_on

logger = logger_of("outbox_plugin.daemon")

LEASE_CHECK_SECONDS = 0.5
LOG_BYTES = 10_000_000  # The largest log; the one before it is kept beside it.


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon of one outbox on this host."""

    settings: Settings
    folder: Path

    @classmethod
    def of(cls, settings: Settings) -> Daemon:
        """The outbox's daemon. All code locations and Dagster instances of this user of the machine share it."""
        name = hashlib.sha256("\0".join(outbox_address(settings)).encode()).hexdigest()[:16]
        return cls(settings, _state_folder() / "outbox-plugin" / name)

    @property
    def log(self) -> Path:
        """Its log."""
        return self.folder / "harvester.log"

    @property
    def lease(self) -> Path:
        """The file that a tick touches. Its name has a digest of the settings; only this user can read the folder.

        Libpq's variables count, too: the daemon keeps the `PGPASSWORD` that it was started with.
        """
        given = {**libpq_environment(), **self.settings.environment()}
        known = [version("outbox-plugin"), *(f"{name}={value}" for name, value in sorted(given.items()))]
        return self.folder / f"lease-{hashlib.sha256(chr(0).join(known).encode()).hexdigest()[:16]}"

    @property
    def running(self) -> bool:
        """Whether it runs: whether its lock is held."""
        with suppress(OSError), (self.folder / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        holder = self._holder()
        return int(holder[0]) if holder else None

    @property
    def outdated(self) -> bool:
        """Whether the running daemon has other settings, or another version of this package."""
        holder = self._holder()
        return holder is not None and holder[1] != self.lease.name

    def _holder(self) -> tuple[str, str] | None:
        """The process id and the lease of the running daemon."""
        if not self.running:
            return None
        with suppress(ValueError, OSError):
            pid, lease = (self.folder / "lock").read_text().split()
            return pid, lease
        return None

    def keep_alive(self, lease_seconds: float, now: float) -> DaemonAction:
        """Renew the lease, and start the daemon if it is not there, without waiting for it.

        Args:
            lease_seconds: how long the daemon runs without another renewal, also one that runs already. The last
                renewal counts, whoever asked for more before.
            now: in seconds since the epoch.

        Raises:
            InvalidSetting: its folder cannot be written to.
            OutboxError: its process cannot be started.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._renew(lease_seconds)
            starts = self._recorded_starts()
            decision = decide(DaemonState(self.running, starts, now))
            if decision is DaemonAction.START:
                (self.folder / "starts.json").write_text(json.dumps([*recent(starts, now), now]))
                self._bound_log()
                log = self.log.open("ab")
        except OSError as error:
            raise InvalidSetting(
                f"XDG_STATE_HOME: the harvester's daemon keeps its lease and its log in {self.folder}, which cannot be "
                f"written to: {error.strerror or error}"
            ) from error
        if decision is DaemonAction.START:
            with log:
                self._start(lease_seconds, log)
        return decision

    def release(self) -> None:
        """Let the lease run out now: the daemon hands over and ends."""
        with suppress(FileNotFoundError):
            os.utime(self.lease, ns=(RELEASED, RELEASED))
        with suppress(FileNotFoundError):
            (self.folder / "starts.json").unlink()

    def _renew(self, lease_seconds: float) -> None:
        text, written = str(lease_seconds), ""
        with suppress(FileNotFoundError):  # A daemon that ends removes it, at any time.
            written = self.lease.read_text()
        if written != text:
            self.lease.write_text(text)
        self.lease.touch()

    def _recorded_starts(self) -> tuple[float, ...]:
        try:
            return tuple(float(start) for start in json.loads((self.folder / "starts.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError, OverflowError, RecursionError):
            return ()

    def _start(self, lease_seconds: float, log: BinaryIO) -> None:
        # It starts in the code location's own folder, so that relative paths in settings lead where they lead for runs.
        # By -P, it imports no module from there.
        command = [sys.executable, "-P", "-m", "outbox_plugin.dagster.daemon", str(self.folder), str(lease_seconds)]
        try:
            child = subprocess.Popen(
                command,
                env={**os.environ, **self.settings.environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise OutboxError(
                f"the harvester's daemon could not be started by {sys.executable}: {error.strerror or error}; "
                "where the environment of the code location was replaced, restart the code location"
            ) from error
        # Wait for its end: else it stays a zombie until the code server ends.
        threading.Thread(target=child.wait, name="harvester-daemon-reaper", daemon=True).start()

    def _bound_log(self) -> None:
        """Begin a new log if the present one is too large: daemons that fail to start fill it with their errors.

        A running daemon does this itself, so this does nothing while one runs.
        """
        with (self.folder / "lock").open("ab") as lock, suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.log.stat().st_size > LOG_BYTES:
                self.log.replace(self.log.with_name(f"{self.log.name}.1"))


def _state_folder() -> Path:
    """The folder for the state of this user's programs. A relative one does not count, as XDG's specification says."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():
        return given
    with suppress(RuntimeError):
        if (home := Path.home()).is_absolute():
            return home / ".local" / "state"
    return Path("/nonexistent")  # A user without a home, as in some containers: a tick says what to set.


def main(folder: Path, lease_seconds: float) -> int:
    """Run the daemon in `folder`; returns the exit code. Ends at once if one runs already."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    if not _taken(lock):
        return 0
    os.ftruncate(lock, 0)  # A daemon that was killed has left its process id, which another process may have by now.
    stop = threading.Event()
    stop_on((signal.SIGTERM,), stop)  # As where a service manager ends all processes of Dagster.
    try:
        daemon = Daemon(Settings(), folder)
        logs.configure(daemon.settings, logs.to_file(daemon.log, LOG_BYTES), "INFO")
        os.pwrite(lock, f"{os.getpid()} {daemon.lease.name}".encode(), 0)
        watched = (daemon.lease, lease_seconds, lock, stop)
        threading.Thread(target=_watch_lease, args=watched, daemon=True).start()
        look_for_cycles_less_often()
        Harvester(daemon.settings).run(stop)
    except OutboxError as error:
        logger.error("%s", error)
        return error.exit_code
    finally:
        os.ftruncate(lock, 0)
    if _is_path_of(lock, folder / "lock"):  # Otherwise these files are those of another daemon.
        daemon.lease.unlink(missing_ok=True)
        (folder / "starts.json").unlink(missing_ok=True)  # It ended as it should: the next start need not wait.
    return 0


def _taken(lock: int) -> bool:
    """Take the lock. Waits for a process that holds it for an instant, to find out whether the daemon runs."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return True
    return False


def _watch_lease(lease: Path, lease_seconds: float, lock: int, stop: threading.Event) -> None:
    clock = LeaseClock(lease_seconds)
    while not stop.wait(LEASE_CHECK_SECONDS):
        if not _is_path_of(lock, lease.parent / "lock"):
            logger.info("the daemon's folder was removed: another daemon may start in its place")
            stop.set()
            continue
        with suppress(OSError, ValueError):  # An empty one is just being written.
            clock.seconds = float(lease.read_text())
        if clock.has_run_out(_renewed(lease), time.monotonic()):
            logger.info("the lease has run out: nobody asks for this harvester any more")
            stop.set()


def _renewed(lease: Path) -> int | None:
    """The time of the lease's file, in nanoseconds; None if the file cannot be read now."""
    try:
        return lease.stat().st_mtime_ns
    except FileNotFoundError:
        return RELEASED
    except OSError:
        return None


def _is_path_of(lock: int, path: Path) -> bool:
    """Whether the file `path` is the one that `lock` is open on, as far as that can be seen now."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
