"""An inbox as a process that can be killed: `python -m tests.inbox_worker <group> <topic> <milliseconds> [<batch>]`.

Each event, or batch of so many, takes so many milliseconds.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import psycopg

from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.settings import Settings
from tests.consuming import record_effect, record_effects


def main() -> None:
    """Run until SIGTERM."""
    group, topic, milliseconds, *batch = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

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
