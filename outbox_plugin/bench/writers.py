"""Writers: what the wake-up trigger costs applications that write as fast as they can."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from psycopg import sql

from outbox_plugin.bench.paced import harvester
from outbox_plugin.bench.scratch import VALUE_BYTES, Tell, connect, scratch_outbox, table_of
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings


@dataclass(frozen=True)
class WritersReport:
    """Commits per second of all writers together, without the wake-up trigger and with it, in turn."""

    writers: int
    without: list[float]
    with_trigger: list[float]

    @property
    def ratio(self) -> float:
        """With over without; the median of the pairs."""
        return median(ours / bare for ours, bare in zip(self.with_trigger, self.without, strict=True))

    def lines(self) -> list[str]:
        """See `Report.lines`."""
        return [
            f"{self.writers} writers without the trigger: {median(self.without):,.0f} commits/s",
            f"with it: {median(self.with_trigger):,.0f} commits/s",
            f"ratio: {self.ratio:.2f} (median of {len(self.without)})",
        ]

    def to_json(self) -> dict[str, Any]:
        """See `Report.to_json`."""
        return {**asdict(self), "ratio": self.ratio}


def writers(settings: Settings, count: int, seconds: float, rounds: int, tell: Tell) -> WritersReport:
    """Let `count` connections write as fast as they can beside a harvester, with the wake-up trigger and without."""
    report = WritersReport(count, [], [])
    for number in range(rounds):
        for name, wake_up, rates in (("without", False, report.without), ("with", True, report.with_trigger)):
            with scratch_outbox(settings) as ours:
                migrate(ours, wake_up=wake_up)
                with harvester(ours):
                    rates.append(_write_hard(ours, count, seconds))
            tell(f"round {number + 1}: {name} the trigger: {rates[-1]:,.0f} commits/s")
    return report


def _write_hard(settings: Settings, count: int, seconds: float) -> float:
    """Commits per second of `count` writers."""
    until = time.monotonic() + seconds
    commits = [0] * count

    def write(number: int) -> None:
        query = sql.SQL("INSERT INTO {} (kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s)").format(
            table_of(settings)
        )
        topic, value = f"{settings.group}-hard", "x" * VALUE_BYTES
        with closing(connect(settings, autocommit=True)) as connection:
            while time.monotonic() < until:
                connection.execute(query, (topic, f"key-{number}", value))
                commits[number] += 1

    began = time.monotonic()
    threads = [threading.Thread(target=write, args=(number,), name="bench-writer") for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(commits) / (time.monotonic() - began)
