"""What a tick of the harvester's sensor costs, and whether many ticks leak memory or threads."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import psutil
from dagster import AssetKey, DagsterInstance, SensorDefinition, build_sensor_context

from outbox_plugin.bench.temporary_outbox import Tell
from outbox_plugin.dagster import HarvesterResource, OutboxResource, build_harvester_sensor
from outbox_plugin.dagster.daemon import Daemon
from outbox_plugin.settings import Settings
from outbox_plugin.status.reader import read_status

WARM_UP_TICKS = 50  # Until libraries have loaded everything that they load once.
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TickReport:
    """Seconds of wall clock and of CPU per tick; memory of the process in MB, after the warm-up and at the end."""

    ticks: int
    median_seconds: float
    p99_seconds: float
    worst_seconds: float
    cpu_seconds: float
    memory_before: float
    memory_after: float
    threads_before: int
    threads_after: int

    def lines(self) -> list[str]:
        """The report as lines of text."""
        return [
            f"median     {self.median_seconds:.3f} s, of it {self.cpu_seconds:.3f} s of CPU, a tick",
            f"p99, worst {self.p99_seconds:.3f} s, {self.worst_seconds:.3f} s",
            f"memory     {self.memory_before:.1f} MB before, {self.memory_after:.1f} MB after {self.ticks} ticks",
            f"threads    {self.threads_before} before, {self.threads_after} after",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def tick(settings: Settings, topics: list[str], ticks: int, tell: Tell) -> TickReport:
    """Tick as the code server would, with a daemon that harvests meanwhile.

    Args:
        settings: of the outbox that the daemon harvests.
        topics: whose ends each tick reports.
        ticks: how many ticks are measured.
        tell: is called with each line of progress.
    """
    process = psutil.Process()
    sensor = build_harvester_sensor(AssetKey("harvester"), topics=topics)
    with _supervised(settings) as harvester, DagsterInstance.ephemeral() as instance:
        cursor: str | None = None
        for _ in range(WARM_UP_TICKS):
            cursor, *_ = _ticked(sensor, harvester, instance, cursor)
        gc.collect()
        memory, threads = process.memory_info().rss, threading.active_count()
        seconds, cpu = [], []
        for number in range(1, ticks + 1):
            cursor, took, used = _ticked(sensor, harvester, instance, cursor)
            seconds.append(took)
            cpu.append(used)
            if number % 100 == 0:
                tell(f"{number} ticks: {median(seconds):.3f} s each, {process.memory_info().rss / 1e6:.1f} MB")
        gc.collect()
        return TickReport(
            ticks,
            median(seconds),
            quantiles(seconds, n=100, method="inclusive")[98],
            max(seconds),
            median(cpu),
            memory / 1e6,
            process.memory_info().rss / 1e6,
            threads,
            threading.active_count(),
        )


def _ticked(
    sensor: SensorDefinition, harvester: HarvesterResource, instance: DagsterInstance, cursor: str | None
) -> tuple[str | None, float, float]:
    """One tick: the cursor that it leaves, and the seconds of wall clock and of CPU that it took."""
    with build_sensor_context(instance=instance, cursor=cursor, resources={"harvester": harvester}) as context:
        began, cpu = time.perf_counter(), time.process_time()
        done = sensor.evaluate_tick(context)
        return done.cursor, time.perf_counter() - began, time.process_time() - cpu


@contextmanager
def _supervised(settings: Settings) -> Iterator[HarvesterResource]:
    """The harvester's resource, whose daemon leads, has a folder of its own, and is ended afterwards."""
    outbox = OutboxResource(
        dsn=settings.dsn.get_secret_value(),
        bootstrap_servers=settings.bootstrap_servers,
        table=settings.table,
        group=settings.group,
        kafka=settings.kafka,
    )
    before = os.environ.get("XDG_STATE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        harvester = HarvesterResource(outbox=outbox)
        daemon = Daemon.of(settings)
        try:
            daemon.keep_alive(harvester.lease_seconds, time.time())
            _wait(lambda: read_status(settings).shards[0].leader is not None)
            yield harvester
        finally:
            daemon.release()
            _wait(lambda: not daemon.running)
            if before is None:
                del os.environ["XDG_STATE_HOME"]
            else:
                os.environ["XDG_STATE_HOME"] = before


def _wait(condition: Callable[[], bool]) -> None:
    """Wait for the condition, for at most `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
