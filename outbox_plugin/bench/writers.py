"""Writers: what the wake-up trigger costs applications that write at full speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from psycopg import sql

from outbox_plugin.bench.relay_processes import harvester
from outbox_plugin.bench.temporary_outbox import VALUE_BYTES, Tell, connect, median_ratio, table_of, temporary_outbox
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings

SETTLE_SECONDS = 0.5


@dataclass(frozen=True)
class WritersReport:
    """Commits per second of all writers together, without the wake-up trigger and with it, in turn."""

    writers: int
    without: list[float]
    with_trigger: list[float]

    @property
    def ratio(self) -> float:
        """With over without; the median of the pairs."""
        return median_ratio(self.with_trigger, self.without)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        return [
            f"{self.writers} writers without the trigger: {median(self.without):,.0f} commits/s",
            f"with it: {median(self.with_trigger):,.0f} commits/s",
            f"ratio: {self.ratio:.2f} (median of {len(self.without)})",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "ratio": self.ratio}


def writers(settings: Settings, count: int, seconds: float, rounds: int, tell: Tell) -> WritersReport:
    """Let connections write as fast as they can beside a harvester, with the wake-up trigger and without.

    All write all the time, and the trigger is disabled and enabled in turn, so that other load affects both alike.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        count: how many connections write.
        seconds: how long each measurement takes.
        rounds: how many times each side is measured, in turn.
        tell: is called with each line of progress.
    """
    report = WritersReport(count, [], [])
    with temporary_outbox(settings) as ours:
        migrate(ours, wake_up=True)
        with harvester(ours), _writing_hard(ours, count) as commits:
            for number in range(rounds):
                report.without.append(_rate(ours, "DISABLE", commits, seconds))
                report.with_trigger.append(_rate(ours, "ENABLE", commits, seconds))
                pair = f"without the trigger {report.without[-1]:,.0f}, with it {report.with_trigger[-1]:,.0f}"
                tell(f"round {number + 1}: {pair} commits/s")
    return report


def _rate(settings: Settings, change: str, commits: list[int], seconds: float) -> float:
    """Commits per second, once the trigger is enabled or disabled."""
    with closing(connect(settings, autocommit=True)) as connection:
        statement = sql.SQL("ALTER TABLE {} {} TRIGGER outbox_wake_up")
        connection.execute(statement.format(table_of(settings), sql.SQL(change)))
    time.sleep(SETTLE_SECONDS)
    before, began = sum(commits), time.monotonic()
    time.sleep(seconds)
    return (sum(commits) - before) / (time.monotonic() - began)


@contextmanager
def _writing_hard(settings: Settings, count: int) -> Iterator[list[int]]:
    """`count` writers until the end of the body; how many commits each has made so far."""
    stop = threading.Event()
    commits = [0] * count

    def write(number: int) -> None:
        query = sql.SQL("INSERT INTO {} (kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s)").format(
            table_of(settings)
        )
        topic, value = f"{settings.group}-hard", "x" * VALUE_BYTES
        with closing(connect(settings, autocommit=True)) as connection:
            while not stop.is_set():
                connection.execute(query, (topic, f"key-{number}", value))
                commits[number] += 1

    threads = [threading.Thread(target=write, args=(number,), name="bench-writer") for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield commits
    finally:
        stop.set()
        for thread in threads:
            thread.join()
