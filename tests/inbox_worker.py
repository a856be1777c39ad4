"""An inbox as a process that can be killed: `python -m tests.inbox_worker <group> <topic> <milliseconds per event>`."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import psycopg

from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.settings import Settings
from tests.consuming import record_effect


def main() -> None:
    """Run until SIGTERM."""
    group, topic, milliseconds = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        time.sleep(int(milliseconds) / 1000)

    Inbox(Settings(), group=group, topics=[topic], handler=handle).run(stop)


if __name__ == "__main__":
    main()
