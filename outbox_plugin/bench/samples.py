"""Takes samples of what must not grow in a long run: memory, threads, descriptors, connections, table, indexes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil
import psycopg
from psycopg import sql

from outbox_plugin.bench.temporary_outbox import connect, table_of
from outbox_plugin.bench.trend import Sample, Trend, trend_of
from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status

_SAMPLES = 600
_MB = 1_000_000


class Quantity(NamedTuple):
    """What is sampled; `allowed_rise` is what it may rise by in a run, in its unit."""

    name: str
    unit: str
    allowed_rise: float


MEMORY = Quantity("memory of a harvester", "MB", 20.0)
THREADS = Quantity("threads of a harvester", "", 4.0)
DESCRIPTORS = Quantity("descriptors of a harvester", "", 16.0)
CONNECTIONS = Quantity("connections to Postgres", "", 6.0)
TABLE = Quantity("table", "MB", 40.0)
INDEXES = Quantity("indexes", "MB", 20.0)


class Sampled(NamedTuple):
    """How one quantity went."""

    name: str
    unit: str
    seconds: float
    trend: Trend

    def __str__(self) -> str:
        trend, unit = self.trend, f" {self.unit}".rstrip()
        return (
            f"{self.name}: {trend.first:,.1f} to {trend.last:,.1f}{unit} in {self.seconds:.0f} s, "
            f"{trend.per_hour:+,.1f}{unit} an hour: {trend.judgement}"
        )


class Span(NamedTuple):
    """One process in one role: a leader has more threads and clients than a standby. Process ids are given again."""

    pid: int
    started_at: float
    leads: bool


class Sampler:
    """Takes samples on a thread of its own. Harvesters come and go, lead or stand by; the longest span is judged."""

    def __init__(self, settings: Settings, pids: Callable[[], dict[int, int]], seconds: float) -> None:
        """Nothing is sampled yet.

        Args:
            settings: of the outbox.
            pids: returns the process ids of the harvesters that run.
            seconds: how long the run takes. It decides how far samples lie apart.
        """
        self._settings = settings
        self._pids = pids
        self._every = max(1.0, seconds / _SAMPLES)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-sampler")
        self._samples: dict[Quantity, dict[Span | None, list[Sample]]] = defaultdict(lambda: defaultdict(list))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample for as long as the body runs."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def results(self) -> list[Sampled]:
        """How each quantity went."""
        found = []
        for quantity, series in self._samples.items():
            samples = max(series.values(), key=lambda each: each[-1][0] - each[0][0])
            trend = trend_of(samples, quantity.allowed_rise)
            found.append(Sampled(quantity.name, quantity.unit, samples[-1][0] - samples[0][0], trend))
        return found

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            now = time.monotonic()
            leaders = {shard.leader.pid for shard in read_status(self._settings, 2.0).shards if shard.leader}
            for pid in self._pids().values():
                with suppress(psutil.Error):
                    self.sample_process(now, psutil.Process(pid), leads=pid in leaders)
            with suppress(psycopg.OperationalError):  # It is away, or being stopped.
                self._sample_postgres(now)

    def sample_process(self, now: float, process: psutil.Process, *, leads: bool) -> None:
        """Take the samples of one harvester.

        Args:
            now: the time, in seconds.
            process: the harvester's.
            leads: whether it leads a shard.

        Raises:
            psutil.Error: it has ended.
        """
        with process.oneshot():
            span = Span(process.pid, process.create_time(), leads)
            values = {
                MEMORY: process.memory_info().rss / _MB,
                THREADS: process.num_threads(),
                DESCRIPTORS: process.num_fds(),
            }
        for quantity, value in values.items():
            self._samples[quantity][span].append((now, value))

    def _sample_postgres(self, now: float) -> None:
        with connect(self._settings, autocommit=True) as connection:
            connection.execute("SET lock_timeout = '1s'")
            values = connection.execute(
                sql.SQL(
                    "SELECT (SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox harvester%%'), "
                    "pg_table_size({table}) / 1e6, pg_indexes_size({table}) / 1e6"
                ).format(table=sql.Literal(table_of(self._settings).as_string(connection))),
            ).fetchone()
        for quantity, value in zip((CONNECTIONS, TABLE, INDEXES), values or (), strict=False):
            self._samples[quantity][None].append((now, float(value)))
