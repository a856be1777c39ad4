"""Postgres and Kafka together, in one folder."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from outbox_plugin.embedded.jars import JarsMissing
from outbox_plugin.embedded.kafka import NOT_PROVED_BY_MOCK, EmbeddedKafka, MockKafka
from outbox_plugin.embedded.postgres import EmbeddedPostgres
from outbox_plugin.embedded.server import write_private
from outbox_plugin.errors import UserError

LEFTOVERS_SECONDS = 30.0  # How long to wait for the servers of a killed run to end.
DEFAULT_STATE_DIR = Path(".outbox")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """How to reach the servers; the DSN holds the database's password."""

    dsn: str = field(repr=False)
    bootstrap_servers: str


class StackInUse(UserError):
    """Another process runs its servers in this folder."""


class FolderRefused(UserError):
    """The folder cannot be written to, so no server can keep its data there."""


def _be_silent(line: str) -> None:
    """Print nothing."""


class EmbeddedStack:
    """Real servers in `state_dir`, for one process at a time. Their data stays there for the next start.

    Example:
        with EmbeddedStack(Path(".outbox")) as endpoints:
            settings = Settings(dsn=endpoints.dsn, bootstrap_servers=endpoints.bootstrap_servers)
    """

    def __init__(self, state_dir: Path = DEFAULT_STATE_DIR, tell: Callable[[str], None] = _be_silent) -> None:
        """Make the servers. `tell` is called with lines about slow steps and problems."""
        self.folder = state_dir.absolute()
        self._tell = tell
        self._lock: int | None = None
        self.postgres = EmbeddedPostgres(self.folder / "postgres")
        self.kafka: EmbeddedKafka | MockKafka = EmbeddedKafka(self.folder / "kafka", tell)

    def start(self) -> Endpoints:
        """Start both servers in parallel, and wait for them.

        Raises:
            StackInUse: another process runs its servers here.
            FolderRefused: the folder cannot be written to.
            ServerFailed: one of them does not start.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
        except OSError as error:
            raise FolderRefused(
                f"the servers cannot keep their data in {self.folder} ({error.strerror}): name a folder that can be "
                "written to"
            ) from None
        try:
            self._start_servers(self._lock)
        except BaseException:
            self.stop()
            raise
        endpoints = Endpoints(self.postgres.dsn, self.kafka.bootstrap_servers)
        write_private(self.folder / "endpoints.json", json.dumps(asdict(endpoints)))
        return endpoints

    def _start_servers(self, lock: int) -> None:
        # The guards inherit the lock, so the folder is free again once the last server has ended.
        self.postgres.launch(inherited=[lock])
        try:
            if isinstance(self.kafka, EmbeddedKafka):
                self.kafka.launch(inherited=[lock])
                self.kafka.wait()
        except JarsMissing as missing:
            self._tell(f"warning: {NOT_PROVED_BY_MOCK.format(reason=missing)}")
            self.kafka = MockKafka()
        self.postgres.wait()

    def stop(self) -> None:
        """Stop both; safe to call twice."""
        (self.folder / "endpoints.json").unlink(missing_ok=True)
        self.kafka.stop()
        self.postgres.stop()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Endpoints:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _locked(self) -> int:
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + LEFTOVERS_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
            except BlockingIOError:
                owner = os.pread(lock, 32, 0)
                if (owner and psutil.pid_exists(int(owner))) or time.monotonic() > deadline:
                    os.close(lock)
                    raise StackInUse(
                        f"another process runs its servers in {self.folder}: stop it first, or use another folder"
                    ) from None
                time.sleep(0.1)
