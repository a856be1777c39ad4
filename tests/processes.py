"""Starts and ends processes that may end at any moment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

from outbox_plugin.embedded.server import EmbeddedServer

# A program that begins with this, and then runs `outbox`, learns soon that no broker answers.
ASKS_BROKERS_BRIEFLY = "from outbox_plugin.adapters import kafka_clients\nkafka_clients.REACH_SECONDS = 0.5\n"


def outbox_that_hears(number: signal.Signals, *arguments: str) -> list[str]:
    """The command that runs `outbox`, which hears a signal also where the tests ignore it, as under nohup."""
    handler = "default_int_handler" if number == signal.SIGINT else "SIG_DFL"
    program = f"import signal; signal.signal({int(number)}, signal.{handler}); import outbox_plugin.__main__"
    return [sys.executable, "-c", program, *arguments]


def kill(processes: Iterable[psutil.Process]) -> None:
    """kill -9 those that still run."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def kill_tree(process: psutil.Process) -> None:
    """kill -9 a process and all its descendants at once, as when a machine is lost."""
    kill(_suspended(process))


def _suspended(process: psutil.Process) -> list[psutil.Process]:
    """Suspend a process and its descendants, so that none starts another, or notices that another is gone."""
    found = []
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        found.append(process)
        for child in process.children():
            found += _suspended(child)
    return found


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """SIGSTOP a process while the body runs: its connections stay open, and it answers nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def launched(server: EmbeddedServer) -> Iterator[None]:
    """Launch a server, wait until it answers, and stop it at the end, also where it does not answer."""
    server.launch()
    try:
        server.wait()
        yield
    finally:
        server.stop()


def command_of(process: psutil.Process) -> str:
    """The command of a process; empty if the process has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def runs(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
