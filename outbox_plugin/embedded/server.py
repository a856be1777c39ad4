"""A server process behind a guard."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import psutil

from outbox_plugin.errors import OutboxError, UserError

_STACK_FRAME = re.compile(r"\s+(at |\.\.\. )")  # A line of a Java stack trace.
START_SECONDS = 180.0  # Long, because Java starts slowly on a busy machine. A server that ends is noticed at once.


class ServerFailed(OutboxError):
    """An embedded server did not start; the message ends with its log's last lines."""


class NotInstalled(ServerFailed):
    """A part that the servers need is not installed; the message says what to install."""

    exit_code = UserError.exit_code


class GuardedServer:
    """A command that runs behind `outbox_plugin.embedded.guard`; its output goes to `log`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        stop_signal: Literal["SIGINT", "SIGTERM"],
        as_nobody_in: Path | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start it.

        Args:
            name: the server's name in messages.
            command: its program and arguments.
            log: the file for its output.
            stop_signal: makes it stop in an orderly way.
            as_nobody_in: run it in this folder as `nobody`, without root's rights. Only for root.
            inherited: file descriptors that stay open as long as the guard runs.
        """
        self._name = name
        self._log = log
        guard = [sys.executable, "-m", "outbox_plugin.embedded.guard", stop_signal]
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                [*guard, str(as_nobody_in or "as-is"), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait until it is `ready`.

        Raises:
            ServerFailed: it ended, or was not ready in time.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if self._guard.poll() is not None:
                raise ServerFailed(f"{self._name} ended while starting; {self._log} ends with: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self._name} was not ready within {seconds:.0f} s; see {self._log}")
            time.sleep(0.05)

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError as error:  # Somebody may have deleted the folder.
            return f"nothing that can be read ({error.strerror})"
        return " | ".join([line for line in lines if not _STACK_FRAME.match(line)][-5:])

    @property
    def pid(self) -> int:
        """The server's own process id.

        Raises:
            ServerFailed: it is not running.
        """
        children = psutil.Process(self._guard.pid).children() if self._guard.poll() is None else []
        if not children:
            raise ServerFailed(f"{self._name} is not running")
        return int(children[0].pid)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the server the signal `number`, by default SIGKILL, and wait until it has ended."""
        psutil.Process(self.pid).send_signal(number)
        self.stop()

    def stop(self) -> None:
        """Close the lifeline, and wait until the server has ended; safe to call twice."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait(60)


class EmbeddedServer(ABC):
    """A server that can be launched, waited for, killed and stopped, again and again."""

    name: str

    def __init__(self, folder: Path) -> None:
        """Make the server. It will keep everything in `folder`."""
        self.folder = folder
        self.port: int | None = None
        self._server: GuardedServer | None = None

    @abstractmethod
    def launch(self, inherited: Sequence[int] = ()) -> None:
        """Start the server without waiting for it, on its former port if that is free.

        Raises:
            ServerFailed: its folder or its configuration could not be created.
        """

    @abstractmethod
    def answers(self, port: int) -> bool:
        """Whether the server at `port` is ready. Called when some process listens there."""

    @property
    def pid(self) -> int:
        """The server's own process id.

        Raises:
            ServerFailed: it is not running.
        """
        if self._server is None:
            raise ServerFailed(f"{self.name} was not started")
        return self._server.pid

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            ServerFailed: it does not.
        """
        if self._server is None:
            raise ServerFailed(f"{self.name} was not started")
        port = self.port or 0
        self._server.wait_until(lambda: accepts_connections(port) and self.answers(port))

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self._server is not None:
            self._server.kill()

    def stop(self) -> None:
        """Stop it; safe to call twice."""
        if self._server is not None:
            self._server.stop()


def accepts_connections(port: int) -> bool:
    """Whether a process listens on that port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def write_private(file: Path, text: str) -> None:
    """Write `file` atomically, readable only by its owner."""
    fresh = file.with_name(f"{file.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(text)
    fresh.replace(file)


def cache_folder() -> Path:
    """The folder of downloads, shared by all checkouts of a user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "outbox-plugin"
