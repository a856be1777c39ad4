"""Latency: from a writer's commit to a `read_committed` consumer, row by row, beside a bare loop in the same run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import psutil

from outbox_plugin.bench.reader import LiveReader
from outbox_plugin.bench.relay_processes import baseline, harvester, wait, write
from outbox_plugin.bench.temporary_outbox import Tell, create_topic, temporary_outbox
from outbox_plugin.errors import UserError
from outbox_plugin.settings import Settings

WARMING_ROWS = 200


@dataclass(frozen=True)
class Latencies:
    """Milliseconds from commit to receipt, and the relay's CPU seconds per second."""

    p50: float
    p99: float
    worst: float
    cpu_per_second: float

    @property
    def line(self) -> str:
        """For people."""
        return (
            f"p50 {self.p50:.1f} ms, p99 {self.p99:.1f} ms, worst {self.worst:.0f} ms; "
            f"{self.cpu_per_second:.3f} CPU s per second"
        )


@dataclass(frozen=True)
class LatencyReport:
    """Both under the same writer, one after the other."""

    delivery: str
    rows_per_second: float
    harvester: Latencies
    baseline: Latencies

    def lines(self) -> list[str]:
        """The report as lines of text."""
        return [
            f"{self.delivery}, {self.rows_per_second:.0f} rows/s, one a transaction",
            f"baseline:  {self.baseline.line}",
            f"harvester: {self.harvester.line}",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def latency(settings: Settings, seconds: float, rows_per_second: float, tell: Tell) -> LatencyReport:
    """Write at a steady rate, first beside a bare loop, then beside `outbox harvest`.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        seconds: how long rows are written on each side.
        rows_per_second: how many rows are written in a second.
        tell: is called with each line of progress.

    Raises:
        UserError: fewer than two rows would be written, which have no percentiles.
        NotRelayed: what was written did not arrive within ten minutes.
    """
    if seconds * rows_per_second < 2:
        raise UserError(f"expected two rows or more (given: {rows_per_second:g} rows per second for {seconds:g} s)")
    found = []
    for name, relay in (("baseline", baseline), ("harvester", harvester)):
        tell(f"{name}: {seconds:.0f} s")
        with temporary_outbox(settings) as ours, relay(ours) as process:
            found.append(_measured(ours, process, seconds, rows_per_second))
    return LatencyReport(settings.delivery, rows_per_second, found[1], found[0])


def _measured(settings: Settings, process: psutil.Process, seconds: float, rows_per_second: float) -> Latencies:
    topic = f"{settings.group}-paced"
    create_topic(settings, topic, 3)
    reader = LiveReader(settings, topic)
    with reader.reading():
        write(settings, topic, WARMING_ROWS, rows_per_second)
        wait(reader, WARMING_ROWS)
        cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
        count = int(seconds * rows_per_second)
        committed = write(settings, topic, count, rows_per_second)
        wait(reader, WARMING_ROWS + count)
        cpu_per_second = (sum(process.cpu_times()[:2]) - cpu) / (time.monotonic() - began)
        arrived = [(int(each.record.value.split(" ")[0]), each.at) for each in reader.arrivals[WARMING_ROWS:]]
    late = sorted((at - committed[number]) * 1000 for number, at in arrived)
    cuts = quantiles(late, n=100)
    return Latencies(cuts[49], cuts[98], late[-1], cpu_per_second)
