"""One process of the long run of consumers: it consumes until SIGTERM, and records what it did in files.

SIGUSR1 makes its next handler hold the interpreter, in a C call: nothing else runs in the process meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import click

from outbox_plugin.coordination import Consumer
from outbox_plugin.coordination.consumer import Guarantee
from outbox_plugin.coordination.events import ClaimEvent, ClaimGained

RECORD = struct.Struct("<HQd")  # Partition, offset, and when it was handed out.
HOLD_INTERVALS = 7 / 3  # Longer than the two intervals that others wait for a heartbeat.
right_time, right_monotonic = time.time, time.monotonic


def set_clocks(seconds: float) -> None:
    """Set all clocks of this process wrong by that many seconds."""
    time.time = lambda: right_time() + seconds
    time.monotonic = lambda: right_monotonic() + seconds


def work(bootstrap_servers: str, topic: str, guarantee: Guarantee, client: str, interval: float, out: Path) -> None:
    """Consume until SIGTERM; each record, and each claim, is in a file before anything else happens."""
    records = os.open(f"{out}.records", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    events = os.open(f"{out}.events", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    to_hold: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: to_hold.append(number))

    def tell(**what: Any) -> None:
        os.write(events, (json.dumps({"at": right_time(), **what}) + "\n").encode())

    def observe(event: ClaimEvent) -> None:
        kind = "gained" if isinstance(event, ClaimGained) else "lost"
        tell(kind=kind, partition=event.topic_partition.partition, log_offset=event.log_offset)

    tell(kind="up")
    with Consumer(
        [topic],
        topic,
        client,
        guarantee,
        heartbeat_interval_seconds=interval,
        coordination_topic=f"{topic}-claims",
        bootstrap_servers=bootstrap_servers,
        observe=observe,
    ) as consumer:
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        tell(kind="made", instance=consumer.instance_id)
        for message in consumer:
            os.write(records, RECORD.pack(message.partition(), message.offset(), right_time()))
            if to_hold:
                to_hold.clear()
                ctypes.PyDLL(None).usleep(int(HOLD_INTERVALS * interval * 1e6))  # PyDLL lets nobody else run meanwhile.
            consumer.commit(message)


@click.command()
@click.argument("bootstrap_servers")
@click.argument("topic")
@click.argument("guarantee")
@click.argument("client")
@click.argument("interval", type=float)
@click.argument("ahead", type=float)
def main(ahead: float, **given: Any) -> None:
    """One process, whose clocks are ahead by so many seconds; it waits for its file's name."""
    set_clocks(ahead)
    if out := sys.stdin.read():
        work(**given, out=Path(out))


if __name__ == "__main__":
    main()
