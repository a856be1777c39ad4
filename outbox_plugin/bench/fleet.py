"""A fleet of `outbox harvest` processes. Each is restarted when it has ended, as a service manager would do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status

END_SECONDS = 40.0
_POLL_SECONDS = 0.05


HARVEST = ("outbox_plugin", "harvest")


class RelayProcess:
    """A process that relays, by default `outbox harvest`, behind a guard, so that it never outlives this process."""

    def __init__(
        self, settings: Settings, log: Path, prefix: Sequence[str] = (), *, module: Sequence[str] = HARVEST
    ) -> None:
        """Start the process.

        Args:
            settings: become the environment of the process.
            log: the process writes to its end.
            prefix: is put before the command, as `ip netns exec` is.
            module: the Python module that is run, and its arguments.
        """
        command = [*prefix, sys.executable, "-m", *module]
        guard = [sys.executable, "-m", "outbox_plugin.embedded.guard", "SIGKILL", "as-is"]
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                [*guard, *command],
                env=environment(settings),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._relay: psutil.Process | None = None

    @property
    def pid(self) -> int | None:
        """The relay's own process id; None before it has been started, and after its end."""
        with suppress(psutil.Error):
            if self._relay is None and self._guard.poll() is None:
                self._relay = next(iter(psutil.Process(self._guard.pid).children()), None)
            if self._relay is not None and self._relay.is_running():
                return int(self._relay.pid)
        return None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; below zero, the signal that ended it."""
        return _signed(self._guard.poll())

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.pid is not None and self._relay is not None:
            with suppress(psutil.Error):
                self._relay.send_signal(number)

    def wait(self, seconds: float = END_SECONDS) -> int | None:
        """Wait for its end; returns its exit code, or None if it has not ended within `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return _signed(self._guard.wait(seconds))
        return None

    def close(self) -> None:
        """Kill it with SIGKILL, if it runs; safe to call twice."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait(END_SECONDS)


def _signed(code: int | None) -> int | None:
    """An exit code, with a signal as a negative number: for a signal, the guard exits with 256 minus its number."""
    return code - 256 if code is not None and code > 128 else code


def environment(settings: Settings) -> dict[str, str]:
    """The environment of a process that is to use `settings`: ours, with all of them in it and no others."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    return {**outside, **settings.environment()}


class Fleet:
    """`count` harvesters of one outbox; their logs are in `folder`."""

    def __init__(
        self,
        settings: Settings,
        count: int,
        folder: Path,
        restart_seconds: float = 0.5,
        slots: Sequence[Settings] | None = None,
        prefixes: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Make a fleet. It starts no process yet.

        Args:
            settings: of this process, and of all harvesters unless there are `slots`.
            count: how many harvesters.
            folder: for their logs.
            restart_seconds: how long to wait before a harvester that has ended is restarted.
            slots: the settings of each harvester, if each reaches the servers in its own way.
            prefixes: what to put before the command of each harvester.
        """
        self._settings = settings
        self._slot_settings = [settings] * count if slots is None else list(slots)
        self._prefixes = [()] * count if prefixes is None else list(prefixes)
        self._restart_seconds = restart_seconds
        self._logs = [folder / f"harvester-{number}.log" for number in range(count)]
        self._slots: list[RelayProcess] = []
        self._restart_at: dict[int, float] = {}
        self._wake_at: dict[int, float] = {}
        self._stop_at: dict[int, float] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="bench-fleet")
        self.failures: list[str] = []  # What harvesters did that they must not do.
        self.ended: Counter[int] = Counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep them running for as long as the body runs; then end them by SIGTERM."""
        self._slots = list(map(RelayProcess, self._slot_settings, self._logs, self._prefixes))
        self._keeper.start()
        try:
            yield
        finally:
            self._ending.set()
            self._keeper.join()
            try:
                for process in self._slots:
                    process.signal(signal.SIGCONT)
                    process.signal(signal.SIGTERM)
                for slot, process in enumerate(self._slots):
                    if process.wait() is None:
                        self._stuck(slot)
            finally:
                for process in self._slots:
                    process.close()

    @property
    def log(self) -> str:
        """The logs of all harvesters."""
        return "".join(log.read_text() for log in self._logs if log.exists())

    def leader(self, patience_seconds: float = 2.0) -> int | None:
        """The slot of shard 0's leader, according to `outbox status`; None if there is none, or a server is away."""
        leader = read_status(self._settings, patience_seconds).shards[0].leader
        with self._lock:
            slots = [number for number, each in enumerate(self._slots) if leader and each.pid == leader.pid]
        return slots[0] if slots else None

    @property
    def alive(self) -> list[int]:
        """The slots whose harvester runs, or is paused."""
        with self._lock:
            return [slot for slot, process in enumerate(self._slots) if process.pid is not None]

    def pids(self) -> dict[int, int]:
        """The process ids of the harvesters that run, by slot."""
        with self._lock:
            return {slot: pid for slot, process in enumerate(self._slots) if (pid := process.pid) is not None}

    def kill(self, slot: int) -> None:
        """Kill a harvester with SIGKILL."""
        self._slots[slot].signal(signal.SIGKILL)

    def pause(self, slot: int, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after `seconds`; returns at once."""
        with self._lock:
            self._slots[slot].signal(signal.SIGSTOP)
            self._wake_at[slot] = time.monotonic() + seconds
            if slot in self._stop_at:
                self._stop_at[slot] += seconds

    def terminate(self, slot: int) -> None:
        """SIGTERM; returns at once. It is a failure if it has not ended after END_SECONDS, not counting pauses."""
        with self._lock:
            self._slots[slot].signal(signal.SIGTERM)
            self._stop_at[slot] = max(time.monotonic(), self._wake_at.get(slot, 0)) + END_SECONDS

    def _keep(self) -> None:
        while not self._ending.wait(_POLL_SECONDS):
            now = time.monotonic()
            with self._lock:
                for slot, process in enumerate(self._slots):
                    self._look_after(slot, process, now)

    def _look_after(self, slot: int, process: RelayProcess, now: float) -> None:
        code = process.exit_code
        if code is None:
            if now > self._wake_at.get(slot, now):
                process.signal(signal.SIGCONT)
                del self._wake_at[slot]
            if now > self._stop_at.get(slot, now):
                self._stuck(slot)
                process.signal(signal.SIGKILL)
                del self._stop_at[slot]
        elif slot not in self._restart_at:
            self.ended[code] += 1
            process.close()
            self._restart_at[slot] = now + self._restart_seconds
        elif now > self._restart_at[slot]:
            self._wake_at.pop(slot, None)
            self._stop_at.pop(slot, None)
            self._slots[slot] = RelayProcess(self._slot_settings[slot], self._logs[slot], self._prefixes[slot])
            del self._restart_at[slot]

    def _stuck(self, slot: int) -> None:
        self.failures.append(f"harvester {slot} had not ended {END_SECONDS:.0f} s after SIGTERM")
