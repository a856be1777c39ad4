"""Drain: how fast one warm harvester relays a backlog, against the floor in the same run."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import psycopg
from psycopg import sql

from outbox_plugin.bench.floor import relay_bare
from outbox_plugin.bench.scratch import scratch_outbox
from outbox_plugin.harvester import Harvester
from outbox_plugin.relay.events import HarvestEvent, TermBegan, WindowPurged
from outbox_plugin.settings import Settings

VALUE_BYTES = 200
PATIENCE_SECONDS = 600


@dataclass(frozen=True)
class Drained:
    """One drain: records per second, and CPU seconds of this process per 100,000 records."""

    records_per_second: float
    cpu_seconds: float


@dataclass(frozen=True)
class DrainReport:
    """Floor and harvester, drained in turn; `ratio` compares each pair, and is the median of them."""

    rows: int
    keys: int
    floor: list[Drained]
    harvester: list[Drained]

    @property
    def ratio(self) -> float:
        """The harvester's records per second over the floor's; above 1 is faster."""
        pairs = zip(self.harvester, self.floor, strict=True)
        return median(ours.records_per_second / floor.records_per_second for ours, floor in pairs)


def drain(settings: Settings, rows: int, keys: int, rounds: int, tell: Callable[[str], None]) -> DrainReport:
    """Fill and drain a table of its own, `rounds` times with the floor and with a harvester that is already running."""
    with scratch_outbox(settings) as scratch:
        warm = threading.Event()
        purged = _Counter()

        def observe(event: HarvestEvent) -> None:
            if isinstance(event, TermBegan):
                warm.set()
            elif isinstance(event, WindowPurged):
                purged.add(event.rows)

        report = DrainReport(rows, keys, [], [])
        table = sql.Identifier(*scratch.table.split("."))
        dsn = scratch.dsn.get_secret_value()
        for number in range(rounds):
            _fill(dsn, table, f"{scratch.group}-floor", rows, keys)
            report.floor.append(
                _timed(rows, lambda: relay_bare(dsn, settings.bootstrap_servers, table, f"{scratch.group}-floor"))
            )
            tell(f"round {number + 1}: floor      {report.floor[-1].records_per_second:9,.0f} records/s")
            with Harvester(scratch, observe=observe):
                if not warm.wait(PATIENCE_SECONDS):
                    raise TimeoutError("the harvester did not begin to lead")
                purged.reset()
                _fill(dsn, table, f"{scratch.group}-harvested", 1_000, keys)  # Warm: topic and connections exist.
                purged.wait_for(1_000)
                purged.reset()
                with psycopg.connect(dsn) as held:  # Filled in one transaction: its commit starts the clock.
                    _insert(held, table, f"{scratch.group}-harvested", rows, keys)
                    held.commit()
                    report.harvester.append(_timed(rows, lambda: purged.wait_for(rows)))
            warm.clear()
            tell(f"round {number + 1}: harvester  {report.harvester[-1].records_per_second:9,.0f} records/s")
        return report


class _Counter:
    """Counts, and waits for a count."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def add(self, count: int) -> None:
        with self._changed:
            self._count += count
            self._changed.notify_all()

    def reset(self) -> None:
        with self._changed:
            self._count = 0

    def wait_for(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._count >= count, PATIENCE_SECONDS):
                raise TimeoutError(f"{self._count} of {count} rows were relayed in {PATIENCE_SECONDS} s")


def _timed(rows: int, work: Callable[[], object]) -> Drained:
    began, cpu = time.perf_counter(), _cpu_seconds()
    work()
    return Drained(rows / (time.perf_counter() - began), (_cpu_seconds() - cpu) / rows * 100_000)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _fill(dsn: str, table: sql.Identifier, topic: str, rows: int, keys: int) -> None:
    with psycopg.connect(dsn) as connection:
        _insert(connection, table, topic, rows, keys)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("VACUUM ANALYZE {}").format(table))


def _insert(
    connection: psycopg.Connection[tuple[object, ...]], table: sql.Identifier, topic: str, rows: int, keys: int
) -> None:
    connection.execute(
        sql.SQL(
            "INSERT INTO {} (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
            "SELECT %s, 'key-' || i %% %s, repeat('x', %s), ARRAY['idempotency-key'], ARRAY[i::text] "
            "FROM generate_series(1, %s) AS i"
        ).format(table),
        (topic, keys, VALUE_BYTES, rows),
    )
