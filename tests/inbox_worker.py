"""An inbox as a process that can be killed: `python -m tests.inbox_worker <group> <topic> <milliseconds> [<batch>]`.

Each event, or each batch of that size, takes so many milliseconds. It prints a line when it ends cleanly after SIGTERM.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import psycopg

from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.settings import Settings
from tests.documents import CHECKOUT
from tests.harvesting import environment
from tests.inbox_support import record_effect, record_effects


def start_worker(settings: Settings, group: str, topic: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a worker. It does not wait until the worker is ready."""
    command = [sys.executable, "-m", "tests.inbox_worker", group, topic, *arguments]
    return subprocess.Popen(command, env=environment(settings), cwd=CHECKOUT, stdout=subprocess.PIPE)


def end_workers(running: Iterable[subprocess.Popen[bytes]]) -> list[int]:
    """End workers cleanly, each as soon as it can. Returns their exit codes."""
    for worker in running:
        assert worker.stdout is not None
        worker.stdout.readline()
        worker.terminate()
        worker.communicate(timeout=90)
    return [worker.returncode for worker in running]


def main() -> None:
    """Run until SIGTERM."""
    group, topic, milliseconds, *batch = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print("ready", flush=True)

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        time.sleep(int(milliseconds) / 1000)

    def handle_batch(connection: psycopg.Connection[Any], events: list[Received]) -> None:
        record_effects(connection, events)
        time.sleep(int(milliseconds) / 1000)

    if batch:
        inbox = Inbox(Settings(), group=group, topics=[topic], handler=handle_batch, batch_size=int(batch[0]))
    else:
        inbox = Inbox(Settings(), group=group, topics=[topic], handler=handle)
    inbox.run(stop)


if __name__ == "__main__":
    main()
