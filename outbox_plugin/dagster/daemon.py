"""The harvester as a daemon: at most one per host and outbox, alive for as long as its lease is renewed.

Its folder holds an OS lock that says whether it runs, the lease (a file whose time each sensor tick sets), its log, and
when it was started. It is started in a session of its own, so it outlives the tick and the code server that
started it; when nobody renews the lease, it hands over and ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from outbox_plugin.dagster.supervision import Decision, Seen, decide, recent
from outbox_plugin.errors import OutboxError
from outbox_plugin.harvester import Harvester
from outbox_plugin.settings import Settings

LEASE_CHECK_SECONDS = 0.5
LOG_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon of one outbox on this host."""

    settings: Settings
    folder: Path

    @classmethod
    def of(cls, settings: Settings) -> Daemon:
        """The daemon for `settings`; the same one for every code location and Dagster instance of this user."""
        given = conninfo_to_dict(settings.dsn.get_secret_value())
        where = [str(given.get(part, "")) for part in ("host", "hostaddr", "port", "dbname")]
        name = hashlib.sha256("\0".join([*where, settings.table, settings.group]).encode()).hexdigest()[:16]
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        return cls(settings, state / "outbox-plugin" / name)

    @property
    def log(self) -> Path:
        """Its log."""
        return self.folder / "harvester.log"

    @property
    def running(self) -> bool:
        """Whether it runs, as the lock tells."""
        with suppress(FileNotFoundError), (self.folder / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        if not self.running:
            return None
        with suppress(ValueError, OSError):
            return int((self.folder / "lock").read_text())
        return None

    def keep_alive(self, lease_seconds: float, now: float) -> Decision:
        """Renew the lease, and start the daemon if it is not there; never waits. `now`: seconds since the epoch."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / "lease").touch()
        starts = self._starts()
        decision = decide(Seen(self.running, starts, now))
        if decision is Decision.START:
            (self.folder / "starts.json").write_text(json.dumps([*recent(starts, now), now]))
            self._start(lease_seconds)
        return decision

    def release(self) -> None:
        """Let the lease run out now: the daemon hands over and ends."""
        with suppress(FileNotFoundError):
            os.utime(self.folder / "lease", (0, 0))
        with suppress(FileNotFoundError):
            (self.folder / "starts.json").unlink()

    def _starts(self) -> tuple[float, ...]:
        try:
            return tuple(float(start) for start in json.loads((self.folder / "starts.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return ()

    def _start(self, lease_seconds: float) -> None:
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        settings = self.settings
        environment = {
            **os.environ,
            "OUTBOX_DSN": settings.dsn.get_secret_value(),  # Not in the arguments, which everybody can read.
            "OUTBOX_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
            "OUTBOX_TABLE": settings.table,
            "OUTBOX_GROUP": settings.group,
            "OUTBOX_DELIVERY": settings.delivery,
            "OUTBOX_SHARDS": str(settings.shards),
            "OUTBOX_KAFKA": json.dumps(settings.kafka),
        }
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "outbox_plugin.dagster.daemon", str(self.folder), str(lease_seconds)],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # Somebody must take note of its end, or it stays as a zombie for as long as the code server lives.
        threading.Thread(target=child.wait, name="harvester-daemon-reaper", daemon=True).start()


def main(folder: Path, lease_seconds: float) -> int:
    """Be the daemon in `folder`; returns the exit code. Does nothing where one runs already."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    if not _taken(lock):
        return 0
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    stop = threading.Event()
    lease = threading.Thread(target=_watch_lease, args=(folder / "lease", lease_seconds, stop), daemon=True)
    lease.start()
    try:
        Harvester(Settings()).run(stop)
    except OutboxError as error:
        logging.error("%s", error)
        return error.exit_code
    finally:
        os.ftruncate(lock, 0)
    return 0


def _taken(lock: int) -> bool:
    """Take the lock. One who only looks whether it is held, holds it for an instant: that one is waited for."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return True
    return False


def _watch_lease(lease: Path, lease_seconds: float, stop: threading.Event) -> None:
    while not stop.wait(LEASE_CHECK_SECONDS):
        try:
            age = time.time() - lease.stat().st_mtime
        except FileNotFoundError:
            age = lease_seconds + 1
        if age > lease_seconds:
            logging.info("the lease has run out: nobody asks for this harvester any more")
            stop.set()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
