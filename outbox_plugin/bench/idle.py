"""Idle: what a harvester without work costs, and how fast the first row after a rest arrives."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from outbox_plugin.bench.reader import LiveReader
from outbox_plugin.bench.relay_processes import harvester, wait, write
from outbox_plugin.bench.temporary_outbox import Tell, connect, create_topic, temporary_outbox
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings

WARMING_ROWS = 200


@dataclass(frozen=True)
class IdleReport:
    """An idle harvester's cost, and the milliseconds from commit to receipt of the first rows after rests."""

    cpu_per_second: float
    queries_per_second: float
    first_milliseconds: list[float]

    def lines(self) -> list[str]:
        """The report as lines of text."""
        first = ", ".join(f"{each:.1f}" for each in self.first_milliseconds)
        return [
            f"idle: {self.cpu_per_second:.4f} CPU s per second, {self.queries_per_second:.1f} transactions/s",
            f"the first row after each rest arrived within {first} ms",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def idle(settings: Settings, seconds: float, times: int, tell: Tell) -> IdleReport:
    """Let `outbox harvest` rest behind the wake-up trigger, then write one row, again and again.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        seconds: how long it rests before each row.
        times: how many rows are written, one after the other.
        tell: is called with each line of progress.

    Raises:
        NotRelayed: what was written did not arrive within ten minutes.
    """
    with temporary_outbox(settings) as ours:
        migrate(ours, wake_up=True)
        topic = f"{ours.group}-paced"
        create_topic(ours, topic, 1)
        reader, first = LiveReader(ours, topic), []
        with harvester(ours) as process, reader.reading():
            write(ours, topic, WARMING_ROWS, 1_000)
            wait(reader, WARMING_ROWS)
            cpu, queries = [], []
            for number in range(times):
                time.sleep(2.0)  # Time to fall asleep.
                before, at = (sum(process.cpu_times()[:2]), transactions(ours)), time.monotonic()
                time.sleep(seconds)
                took = time.monotonic() - at
                cpu.append((sum(process.cpu_times()[:2]) - before[0]) / took)
                queries.append((transactions(ours) - before[1] - 1) / took)  # Without the query that counts them.
                [committed] = write(ours, topic, 1, 1)
                wait(reader, WARMING_ROWS + number + 1)
                first.append((reader.arrivals[-1].at - committed) * 1000)
                tell(f"rest {number + 1}: first row after {first[-1]:.1f} ms")
    return IdleReport(mean(cpu), mean(queries), first)


def transactions(settings: Settings) -> int:
    """How many transactions have ended in the database."""
    with connect(settings, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    return int(row[0]) if row else 0
