"""Drains: how fast one warm harvester relays a backlog, against the baseline or another backlog, in one run."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import psutil
from psycopg import sql

from outbox_plugin.bench.baseline import ready_to_relay
from outbox_plugin.bench.temporary_outbox import (
    PATIENCE_SECONDS,
    Tell,
    connect,
    insert,
    median_ratio,
    table_of,
    temporary_outbox,
    vacuum,
)
from outbox_plugin.harvester import Harvester, look_for_cycles_less_often
from outbox_plugin.relay.events import HarvestEvent, TermBegan, WindowPurged
from outbox_plugin.settings import Settings

WARMING_ROWS = 1_000
KEYS = 10_000
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Drained:
    """One drain: records per second, CPU seconds of this process per 100,000 records, and the most MB it had."""

    records_per_second: float
    cpu_seconds: float
    resident_megabytes: float


@dataclass(frozen=True)
class DrainReport:
    """Two kinds of drain, done in turn; `ratio` compares each pair, and is the median of them."""

    name: str
    reference_name: str
    drains: list[Drained] = field(default_factory=list)
    reference: list[Drained] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Records per second over the reference's; above 1 is faster."""
        ours, theirs = ([run.records_per_second for run in runs] for runs in (self.drains, self.reference))
        return median_ratio(ours, theirs)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        lines = []
        for name, runs in ((self.reference_name, self.reference), (self.name, self.drains)):
            speed, cpu = median(run.records_per_second for run in runs), median(run.cpu_seconds for run in runs)
            memory = max(run.resident_megabytes for run in runs)
            lines.append(
                f"{name}: {speed:,.0f} records/s, {cpu:.2f} CPU s per 100,000 records, at most {memory:.0f} MB"
            )
        return [*lines, f"ratio: {self.ratio:.2f} of {self.reference_name} (median of {len(self.drains)})"]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "ratio": self.ratio}


def against_baseline(settings: Settings, rows: int, keys: int, rounds: int, tell: Tell) -> DrainReport:
    """Drain a backlog with a harvester, and with a bare loop.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        rows: how many rows are drained each time.
        keys: how many keys the rows have.
        rounds: how many times each side is measured, in turn.
        tell: is called with each line of progress.
    """
    with temporary_outbox(settings) as ours:
        return _in_turn(
            DrainReport("harvester", "baseline"),
            lambda: harvested(ours, rows, keys),
            lambda: _bare(ours, rows, keys),
            rounds,
            tell,
        )


def hot_key(settings: Settings, rows: int, rounds: int, tell: Tell) -> DrainReport:
    """Drain rows that all have one key, and rows that have 10,000 keys.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        rows: how many rows are drained each time.
        rounds: how many times each side is measured, in turn.
        tell: is called with each line of progress.
    """
    with temporary_outbox(settings) as ours:
        return _in_turn(
            DrainReport("1 key", f"{KEYS:,} keys"),
            lambda: harvested(ours, rows, 1),
            lambda: harvested(ours, rows, KEYS),
            rounds,
            tell,
        )


def old_snapshot(settings: Settings, rows: int, dead_rows: int, rounds: int, tell: Tell) -> DrainReport:
    """Drain a backlog while an old snapshot keeps dead rows in the index, and without dead rows.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        rows: how many rows are drained each time.
        dead_rows: how many deleted rows the old snapshot keeps in the index.
        rounds: how many times each side is measured, in turn.
        tell: is called with each line of progress.
    """

    def with_old_snapshot() -> Drained:
        with temporary_outbox(settings) as ours, _dead_rows_held(ours, dead_rows):
            return harvested(ours, rows, KEYS)

    def without_old_snapshot() -> Drained:
        with temporary_outbox(settings) as ours:
            return harvested(ours, rows, KEYS)

    report = DrainReport(f"old snapshot, {dead_rows:,} dead rows", "no old snapshot")
    return _in_turn(report, with_old_snapshot, without_old_snapshot, rounds, tell)


def big_backlog(settings: Settings, rows: int, reference_rows: int, rounds: int, tell: Tell) -> DrainReport:
    """Drain a very large backlog, and a usual one.

    Args:
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        rows: how many rows the very large backlog has.
        reference_rows: how many rows the usual backlog has.
        rounds: how many times each side is measured, in turn.
        tell: is called with each line of progress.
    """

    def drained(count: int) -> Drained:
        with temporary_outbox(settings) as ours:
            return harvested(ours, count, KEYS)

    report = DrainReport(f"{rows:,} rows", f"{reference_rows:,} rows")
    return _in_turn(report, lambda: drained(rows), lambda: drained(reference_rows), rounds, tell)


def _in_turn(
    report: DrainReport, ours: Callable[[], Drained], reference: Callable[[], Drained], rounds: int, tell: Tell
) -> DrainReport:
    look_for_cycles_less_often()  # As `outbox harvest` does; the reference too.
    reference()  # A warm-up, which is not counted.
    for number in range(rounds):
        for name, drain, runs in (
            (report.reference_name, reference, report.reference),
            (report.name, ours, report.drains),
        ):
            runs.append(drain())
            tell(f"round {number + 1}: {name}: {runs[-1].records_per_second:,.0f} records/s")
    return report


def _bare(settings: Settings, rows: int, keys: int) -> Drained:
    """Drain rows with the baseline's loop, as warm as the harvester is, and from a table as fresh."""
    topic = f"{settings.group}-baseline"
    with ready_to_relay(settings, topic) as relay, connect(settings, autocommit=True) as connection:
        insert(connection, settings, topic, WARMING_ROWS, keys)
        relay()
        insert(connection, settings, topic, rows, keys)
        drained = _timed(rows, relay)
    vacuum(settings)
    return drained


def harvested(
    settings: Settings,
    rows: int,
    keys: int,
    observe: Callable[[HarvestEvent], None] = lambda _: None,
    begin: Callable[[], None] = lambda: None,
) -> Drained:
    """Drain rows with a harvester that already leads and has relayed some. The time starts with their commit.

    Args:
        settings: of the outbox.
        rows: how many rows are drained.
        keys: how many keys the rows have.
        observe: called with each event of the harvester.
        begin: called before the rows are committed.
    """
    warm, purged = threading.Event(), _Counter()

    def observe_and_count(event: HarvestEvent) -> None:
        observe(event)
        if isinstance(event, TermBegan):
            warm.set()
        elif isinstance(event, WindowPurged):
            purged.add(event.rows)

    topic = f"{settings.group}-harvested"
    with Harvester(settings, observe=observe_and_count), closing(connect(settings)) as connection:
        if not warm.wait(PATIENCE_SECONDS):
            raise TimeoutError("the harvester did not begin to lead")
        insert(connection, settings, topic, WARMING_ROWS, keys)
        connection.commit()
        purged.wait_for(WARMING_ROWS)
        purged.reset()
        insert(connection, settings, topic, rows, keys)
        begin()
        connection.commit()
        drained = _timed(rows, lambda: purged.wait_for(rows))
    vacuum(settings)
    return drained


@contextmanager
def _dead_rows_held(settings: Settings, dead_rows: int) -> Iterator[None]:
    """Insert and delete `dead_rows`, and hold a snapshot older than their deletion, so that they stay in the index."""
    with closing(connect(settings)) as holder, connect(settings, autocommit=True) as connection:
        insert(connection, settings, f"{settings.group}-dead", dead_rows, KEYS)
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute(sql.SQL("SELECT id FROM {} LIMIT 1").format(table_of(settings)))
        connection.execute(sql.SQL("DELETE FROM {}").format(table_of(settings)))
        yield
        holder.rollback()


class _Counter:
    """Counts on any thread, and waits for a count on another."""

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
                raise TimeoutError(f"{self._count} of {count} rows were relayed in {PATIENCE_SECONDS:.0f} s")


def _timed(rows: int, work: Callable[[], object]) -> Drained:
    with _watched_memory() as memory:
        began, cpu = time.perf_counter(), process_cpu_seconds()
        work()
        seconds, cpu = time.perf_counter() - began, process_cpu_seconds() - cpu
    return Drained(rows / seconds, cpu / rows * 100_000, max(memory) / 1e6)


@contextmanager
def _watched_memory() -> Iterator[list[int]]:
    """The resident bytes of this process, sampled repeatedly while the body runs."""
    process, done = psutil.Process(), threading.Event()
    looks = [process.memory_info().rss]

    def look() -> None:
        while not done.wait(_POLL_SECONDS):
            looks.append(process.memory_info().rss)

    looker = threading.Thread(target=look, name="bench-memory")
    looker.start()
    try:
        yield looks
    finally:
        done.set()
        looker.join()


def process_cpu_seconds() -> float:
    """The CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
