"""Relays as processes of their own, and rows that are written to them one by one."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import psutil
from psycopg import sql

from outbox_plugin.bench.fleet import HARVEST, RelayProcess
from outbox_plugin.bench.reader import LiveReader
from outbox_plugin.bench.temporary_outbox import PATIENCE_SECONDS, VALUE_BYTES, connect, table_of
from outbox_plugin.errors import OutboxError
from outbox_plugin.settings import Settings

KEYS = 1_000


class NotRelayed(OutboxError):
    """Rows did not arrive."""


def wait(reader: LiveReader, count: int) -> None:
    """Wait until `count` rows have arrived.

    Raises:
        NotRelayed: they have not, in ten minutes.
    """
    if not reader.wait_for(lambda arrivals: len(arrivals) >= count, PATIENCE_SECONDS):
        raise NotRelayed(f"{len(reader.arrivals)} of {count} rows arrived in {PATIENCE_SECONDS:.0f} s")


def write(settings: Settings, topic: str, count: int, rows_per_second: float) -> Sequence[float]:
    """Write rows at a steady rate, each in a transaction of its own. Returns when each was committed.

    Args:
        settings: of the outbox.
        topic: of the rows.
        count: how many rows are written.
        rows_per_second: how many rows are written in a second.
    """
    committed: list[float] = []
    write_while(settings, topic, rows_per_second, committed, lambda: len(committed) < count)
    return committed


def write_while(
    settings: Settings, topic: str, rows_per_second: float, committed: list[float], goes_on: Callable[[], bool]
) -> None:
    """Write rows, each in a transaction of its own, at a steady pace.

    Args:
        settings: which outbox.
        topic: of the rows.
        rows_per_second: the pace.
        committed: is given the time of each commit, in seconds of this process's monotonic clock.
        goes_on: whether to write another row.
    """
    query = sql.SQL(
        "INSERT INTO {} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
        "VALUES (clock_timestamp(), %s, %s, %s, ARRAY['idempotency-key'], ARRAY[%s])"
    ).format(table_of(settings))
    with closing(connect(settings, autocommit=True)) as connection:
        due = time.monotonic()
        while goes_on():
            time.sleep(max(0.0, due - time.monotonic()))
            number = len(committed)
            value = f"{number} ".ljust(VALUE_BYTES, "x")
            connection.execute(query, (topic, f"key-{number % KEYS}", value, str(number)))
            committed.append(time.monotonic())
            due += 1 / rows_per_second


def harvester(settings: Settings) -> AbstractContextManager[psutil.Process]:
    """`outbox harvest`, until the end of the body."""
    return _relay(settings, HARVEST)


def baseline(settings: Settings) -> AbstractContextManager[psutil.Process]:
    """The bare loop, until the end of the body."""
    return _relay(settings, ("outbox_plugin.bench.baseline",))


@contextmanager
def _relay(settings: Settings, module: Sequence[str]) -> Iterator[psutil.Process]:
    with (
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder,
        closing(RelayProcess(settings, Path(folder) / "relay.log", module=module)) as process,
    ):
        yield psutil.Process(_pid(process))
        process.signal(signal.SIGTERM)
        process.wait()


def _pid(relay: RelayProcess) -> int:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while relay.pid is None:
        if relay.exit_code is not None or time.monotonic() > deadline:
            raise NotRelayed("the relay did not start")
        time.sleep(0.05)
    return relay.pid
