"""Chaos: disturbs servers, harvesters, network and tables under a steady writer, and accounts for every row."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path

import psycopg
from confluent_kafka import KafkaException
from psycopg import sql

from outbox_plugin.bench.chaos_report import ChaosReport
from outbox_plugin.bench.faults import SOAK_SECONDS, Fault, plan
from outbox_plugin.bench.fleet import Fleet
from outbox_plugin.bench.gaps import explain_longest_gap
from outbox_plugin.bench.injection import Injector
from outbox_plugin.bench.judge import judge
from outbox_plugin.bench.reader import LiveReader, read_until
from outbox_plugin.bench.samples import Sampler
from outbox_plugin.bench.servers import Servers
from outbox_plugin.bench.temporary_outbox import Tell, connect, create_topic, table_of
from outbox_plugin.bench.writer import Mix, Writer
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.embedded.cluster import NODES
from outbox_plugin.errors import OutboxError
from outbox_plugin.settings import Settings

TOPIC, PARTITIONS = "chaos", 6
HARVESTERS = 3
FIRST_SECONDS, DRAIN_SECONDS, READ_SECONDS = 60.0, 180.0, 60.0
_TELL_SECONDS = 5.0
_MEND_EVERY_SECONDS = 1.0


def chaos(seconds: float, seed: int, delivery: Delivery | None, tell: Tell) -> ChaosReport:
    """Run on its own servers, with the user's other settings. Their folder is kept if something was wrong.

    Args:
        seconds: how long faults are injected.
        seed: decides which faults come, and when.
        delivery: of the harvesters; None for the one in the user's settings.
        tell: is called with each line of progress.

    Raises:
        ServerFailed: a server did not come back.
    """
    logging.getLogger("psycopg").setLevel(logging.CRITICAL)  # It would log each connection that a restart cuts.
    folder = Path(tempfile.mkdtemp(prefix="outbox-chaos-"))
    tell(f"seed {seed}; servers and logs are in {folder}")
    report = None
    try:
        servers = Servers(folder, tell, HARVESTERS)
        with servers.running(delivery) as settings:
            create_topic(settings, TOPIC, PARTITIONS)
            report = _Run(servers, settings, folder, seconds, seed, tell).run()
    finally:
        if report is not None and report.clean:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            tell(f"see {folder}")
    return report


class _Run:
    """One run on servers that are up."""

    def __init__(
        self, servers: Servers, settings: Settings, folder: Path, seconds: float, seed: int, tell: Tell
    ) -> None:
        self._settings = settings
        self._seconds = seconds
        self._seed = seed
        self._tell = tell
        slots = [servers.through(route, settings) for route in servers.routes]
        self._fleet = Fleet(settings, HARVESTERS, folder, slots=slots)
        self._writer = Writer(settings, TOPIC, Mix(), seed)
        self._reader = LiveReader(settings, TOPIC)
        self._sampler = Sampler(settings, self._fleet.pids, seconds)
        self._injector = Injector(servers, settings, TOPIC, self._fleet, self._writer, seconds, self._note)
        self._failures: list[str] = []
        self._began = 0.0

    def run(self) -> ChaosReport:
        """Disturb, drain, read, judge."""
        with self._reader.reading(), self._fleet.running():
            with self._writer.writing():
                self._reader.wait_for(bool, FIRST_SECONDS)
                with self._sampler.sampling():
                    self._disturb()
            self._note("all servers are up, nobody writes: draining")
            drain_seconds = self._drain()
        committed = self._writer.committed()
        in_topic = sum(each.rows - len(each.aside) for each in committed.values())
        self._note(f"reading {in_topic:,} rows")
        seen = read_until(self._settings, TOPIC, lambda records: len(records) >= in_topic, READ_SECONDS)
        arrivals = [each.at - self._began for each in self._reader.arrivals]
        sampled = self._sampler.results()
        if self._seconds >= SOAK_SECONDS:
            self._failures += [f"growing: {each}" for each in sampled if each.trend.judgement == "growing"]
        return ChaosReport(
            delivery=self._settings.delivery,
            bad_rows=self._settings.bad_rows,
            shards=self._settings.shards,
            seed=self._seed,
            seconds=self._seconds,
            verdict=judge(committed, seen, self._injector.bad_rows.found_aside()),
            faults=dict(self._injector.done),
            transactions=len(committed),
            rolled_back=self._writer.rolled_back,
            ended=dict(self._fleet.ended),
            drain_seconds=round(drain_seconds, 1),
            longest_gap=explain_longest_gap(arrivals, self._injector.injected),
            sampled=sampled,
            tracebacks=self._fleet.log.count("Traceback"),
            failures=[*self._failures, *self._fleet.failures],
        )

    def _disturb(self) -> None:
        """Inject the planned faults, and print progress, until the time is over and all servers are up again."""
        planned = plan(self._seed, self._seconds, HARVESTERS, NODES)
        self._began = self._injector.begin()
        over = self._injector.over
        with ThreadPoolExecutor(len(planned)) as pool:
            tasks = [
                pool.submit(self._each, faults, self._injector.by_actor[actor]) for actor, faults in planned.items()
            ]
            try:
                while self._elapsed < self._seconds or not all(task.done() for task in tasks):
                    failed = wait(tasks, min(_TELL_SECONDS, self._seconds), FIRST_EXCEPTION).done
                    if any(task.exception() for task in failed):
                        break
                    if len(failed) == len(tasks):
                        over.wait(min(_TELL_SECONDS, max(0.0, self._seconds - self._elapsed)))
                    self._note(self._progress())
            finally:
                over.set()
            for task in tasks:
                task.result()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _each(self, faults: Sequence[Fault], inject: Callable[[Fault], None]) -> None:
        for fault in faults:
            if self._injector.over.wait(max(0.0, fault.at - self._elapsed)):
                return
            inject(fault)

    def _note(self, line: str) -> None:
        self._tell(f"{self._elapsed:5.0f} of {self._seconds:.0f} s: {line}")

    def _progress(self) -> str:
        return f"{self._writer.rows:,} rows committed, {len(self._reader.arrivals):,} arrived"

    def _drain(self) -> float:
        """Wait until the outbox is empty, but not for ever. Returns how many seconds it waited."""
        began = time.monotonic()
        mend_at = began
        while backlog := count_rows(self._settings):
            if time.monotonic() - began > DRAIN_SECONDS:
                self._failures.append(f"{backlog} rows were not drained within {DRAIN_SECONDS:.0f} s")
                break
            if self._injector.bad_rows.can_be_mended and time.monotonic() >= mend_at:
                with suppress(OutboxError, KafkaException, psycopg.Error):
                    self._injector.bad_rows.mend()
                mend_at = time.monotonic() + _MEND_EVERY_SECONDS
            time.sleep(0.05)
        return time.monotonic() - began


def count_rows(settings: Settings) -> int:
    """How many rows wait in the outbox.

    Raises:
        psycopg.OperationalError: Postgres is away.
    """
    with closing(connect(settings)) as connection:
        row = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(table_of(settings))).fetchone()
    return int(row[0]) if row else 0
