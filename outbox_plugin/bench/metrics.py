"""What metrics cost a drain: the CPU time of counting events, of asking Postgres, and of scrapes.

Two drains differ by more than metrics cost. So every drain has metrics, and the time that they take is measured in it.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any
from urllib.request import urlopen

from outbox_plugin.bench.drain import KEYS, harvested, process_cpu_seconds
from outbox_plugin.bench.temporary_outbox import Tell, temporary_outbox
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.harvester import look_for_cycles_less_often
from outbox_plugin.observe.harvester_telemetry import HarvesterTelemetry
from outbox_plugin.observe.table_poller import THREAD_NAME
from outbox_plugin.relay.events import HarvestEvent
from outbox_plugin.settings import Settings

SCRAPES = 50
_SCRAPE_INTERVAL_SECONDS = 15.0  # What is usual.


@dataclass(frozen=True)
class MetricsCost:
    """CPU seconds: of a whole drain, and in it of counting its events and of asking Postgres; of one scrape."""

    drain: float
    counting: float
    asking: float
    scrape: float
    drain_seconds: float

    @property
    def share(self) -> float:
        """The share of the drain's CPU time that metrics take, scraped every 15 s."""
        return (self.counting + self.asking + self.scrape * self.drain_seconds / _SCRAPE_INTERVAL_SECONDS) / self.drain


@dataclass(frozen=True)
class MetricsReport:
    """Several drains of so many rows."""

    rows: int
    costs: list[MetricsCost] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The median share of a drain's CPU time."""
        return median(cost.share for cost in self.costs)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        counting = median(cost.counting / cost.drain for cost in self.costs)
        asking = median(cost.asking / cost.drain for cost in self.costs)
        scrape = median(cost.scrape for cost in self.costs)
        return [
            f"counting events: {counting:.2%} of a drain's CPU time",
            f"asking Postgres: {asking:.2%}",
            f"a scrape: {scrape * 1000:.1f} ms of CPU time",
            f"metrics, scraped every {_SCRAPE_INTERVAL_SECONDS:.0f} s: {self.share:.2%} of the CPU time of a drain of "
            f"{self.rows:,} rows (median of {len(self.costs)})",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "share": self.share}


def metrics(settings: Settings, rows: int, rounds: int, tell: Tell) -> MetricsReport:
    """Drain a backlog with metrics.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        rows: how many rows are drained each time.
        rounds: how many drains are measured, after one that is not.
        tell: is called with each line of progress.
    """
    look_for_cycles_less_often()  # As `outbox harvest` does.
    report = MetricsReport(rows)
    with temporary_outbox(settings) as ours:
        _measured(ours, rows)
        for number in range(rounds):
            report.costs.append(_measured(ours, rows))
            tell(f"round {number + 1}: {report.costs[-1].share:.2%}")
    return report


def _measured(settings: Settings, rows: int) -> MetricsCost:
    listen = f"127.0.0.1:{free_port()}"
    telemetry = HarvesterTelemetry(
        settings, listen, error=lambda: None, stopping=lambda: False, now=time.monotonic
    )  # As the harvester itself makes it where OUTBOX_LISTEN is set.
    counted: list[float] = []

    def observe(event: HarvestEvent) -> None:
        began = time.thread_time()
        telemetry.observe(event)
        counted.append(time.thread_time() - began)

    with closing(telemetry):
        telemetry.poll_table()
        asking = _Clock(THREAD_NAME)

        def begin() -> None:
            counted.clear()
            asking.begin()

        drained = harvested(settings, rows, KEYS, observe, begin)
        counting, asked = sum(counted), asking.seconds()
        began = process_cpu_seconds()
        for _ in range(SCRAPES):  # What asks counts, too: it is in this process.
            with urlopen(f"http://{listen}/metrics") as answer:
                answer.read()
        scrape = (process_cpu_seconds() - began) / SCRAPES
    return MetricsCost(drained.cpu_seconds * rows / 100_000, counting, asked, scrape, rows / drained.records_per_second)


class _Clock:
    """The CPU time of another thread of this process."""

    def __init__(self, name: str) -> None:
        [ident] = [each.ident for each in threading.enumerate() if each.name == name and each.ident is not None]
        self._clock = time.pthread_getcpuclockid(ident)
        self.begin()

    def begin(self) -> None:
        self._began = time.clock_gettime(self._clock)

    def seconds(self) -> float:
        return time.clock_gettime(self._clock) - self._began
