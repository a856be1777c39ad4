"""Chaos: harvesters, brokers and Postgres are killed, paused and restarted under a steady writer; all is counted."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import sql

from outbox_plugin.adapters.kafka import client_config
from outbox_plugin.bench.faults import Fault, plan
from outbox_plugin.bench.fleet import Fleet
from outbox_plugin.bench.judge import Verdict, judge
from outbox_plugin.bench.reader import Arrival, LiveReader, read_until
from outbox_plugin.bench.scratch import Tell
from outbox_plugin.bench.writer import Mix, Writer
from outbox_plugin.embedded.cluster import COORDINATING_TOPICS, NODES, EmbeddedCluster
from outbox_plugin.embedded.postgres import EmbeddedPostgres
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Delivery, Settings

TOPIC, PARTITIONS = "chaos", 6
HARVESTERS = 3
FIRST_SECONDS, DRAIN_SECONDS, READ_SECONDS = 60.0, 180.0, 60.0
_TELL_SECONDS = 5.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class ChaosReport:
    """What was done, and what became of the rows. `ended` counts the harvesters' ends by exit code or signal."""

    delivery: Delivery
    shards: int
    seed: int
    seconds: float
    verdict: Verdict
    faults: dict[str, int]
    transactions: int
    rolled_back: int
    ended: dict[int, int]
    drain_seconds: float
    longest_silence_seconds: float
    tracebacks: int
    failures: list[str]

    @property
    def records_per_second(self) -> float:
        """Records that arrived, over the length of the run and of the drain."""
        return self.verdict.arrived / (self.seconds + self.drain_seconds)

    @property
    def clean(self) -> bool:
        """Whether no promise was broken, and nothing got stuck; at-least-once delivery may repeat rows."""
        verdict = self.verdict
        repeated = verdict.duplicates if self.delivery == "exactly-once" else 0
        return not (verdict.lost or repeated or verdict.order_violations or verdict.phantoms or self.failures)

    def lines(self) -> list[str]:
        """The report for people."""
        verdict, faults = self.verdict, Counter(self.faults)
        return [
            *verdict.examples,
            *self.failures,
            f"{faults['kill']} harvesters killed, {faults['pause']} paused, {faults['terminate']} terminated; "
            f"{faults['broker']} brokers killed; {faults['postgres']} immediate restarts of Postgres",
            f"{verdict.committed:,} rows of {self.transactions:,} transactions committed, {self.rolled_back:,} "
            f"transactions rolled back; {verdict.arrived:,} rows arrived, {self.records_per_second:,.0f} records/s; "
            f"drained in {self.drain_seconds} s; longest silence {self.longest_silence_seconds} s",
            f"{verdict.lost} lost, {verdict.duplicates} duplicates, {verdict.order_violations} order violations, "
            f"{verdict.phantoms} phantoms",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        values = asdict(self)
        verdict = values.pop("verdict")
        return {"clean": self.clean, **verdict, **values, "records_per_second": round(self.records_per_second, 1)}


class Servers:
    """A Postgres and a cluster of three brokers in `folder`, with an outbox in it."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        """Nothing is started yet."""
        self.postgres = EmbeddedPostgres(folder / "postgres")
        self.cluster = EmbeddedCluster(folder / "kafka", tell)

    @contextmanager
    def running(self, delivery: Delivery | None = None) -> Iterator[Settings]:
        """Run them for as long as the body runs; gives settings for a migrated outbox, whose topic is there."""
        try:
            self.postgres.launch()
            self.cluster.start()
            self.postgres.wait()
            asked = {"delivery": delivery} if delivery else {}
            settings = Settings(dsn=self.postgres.dsn, bootstrap_servers=self.cluster.bootstrap_servers, **asked)
            migrate(settings)
            create_topic(settings, TOPIC, PARTITIONS)
            self.cluster.wait_in_sync()
            yield settings
        finally:
            self.cluster.stop()
            self.postgres.stop()


def chaos(seconds: float, seed: int, delivery: Delivery | None, tell: Tell) -> ChaosReport:
    """Run it on servers of its own, in a folder that is kept if something was wrong; other settings are the user's.

    Raises:
        ServerFailed: a server did not come back.
    """
    logging.getLogger("psycopg").setLevel(logging.CRITICAL)  # It would tell of each connection that a restart cuts.
    folder = Path(tempfile.mkdtemp(prefix="outbox-chaos-"))
    tell(f"seed {seed}; servers and logs are in {folder}")
    report = None
    try:
        servers = Servers(folder, tell)
        with servers.running(delivery) as settings:
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
        self._servers = servers
        self._settings = settings
        self._seconds = seconds
        self._seed = seed
        self._tell = tell
        self._fleet = Fleet(settings, HARVESTERS, folder)
        self._writer = Writer(settings, TOPIC, Mix(), seed)
        self._reader = LiveReader(settings, TOPIC)
        self._done: Counter[str] = Counter()
        self._failures: list[str] = []
        self._over = threading.Event()
        self._began = 0.0

    def run(self) -> ChaosReport:
        """Disturb, drain, read, judge."""
        with self._reader.reading(), self._fleet.running():
            with self._writer.writing():
                self._reader.wait_for(bool, FIRST_SECONDS)
                self._disturb()
            self._note("all servers are up, nobody writes: draining")
            drain_seconds = self._drain()
        committed = self._writer.committed()
        rows = sum(each.rows for each in committed.values())
        self._note(f"reading {rows:,} rows")
        seen = read_until(self._settings, TOPIC, lambda records: len(records) >= rows, READ_SECONDS)
        return ChaosReport(
            delivery=self._settings.delivery,
            shards=self._settings.shards,
            seed=self._seed,
            seconds=self._seconds,
            verdict=judge(committed, seen),
            faults=dict(self._done),
            transactions=len(committed),
            rolled_back=self._writer.rolled_back,
            ended=dict(self._fleet.ended),
            drain_seconds=round(drain_seconds, 1),
            longest_silence_seconds=round(longest_silence(self._reader.arrivals), 2),
            tracebacks=self._fleet.log.count("Traceback"),
            failures=[*self._failures, *self._fleet.failures],
        )

    def _disturb(self) -> None:
        """Inject what is planned, and say how it goes; returns when the time is over and all servers are up again."""
        self._began = time.monotonic()
        harvesters, brokers, postgres = plan(self._seed, self._seconds, HARVESTERS, NODES)
        with ThreadPoolExecutor(3) as pool:
            tasks = [
                pool.submit(self._each, faults, inject)
                for faults, inject in (
                    (harvesters, self._harvester_fault),
                    (brokers, self._broker_fault),
                    (postgres, self._postgres_fault),
                )
            ]
            try:
                while self._elapsed < self._seconds or not all(task.done() for task in tasks):
                    failed = wait(tasks, min(_TELL_SECONDS, self._seconds), FIRST_EXCEPTION).done
                    if any(task.exception() for task in failed):
                        break
                    if len(failed) == len(tasks):
                        self._over.wait(min(_TELL_SECONDS, max(0.0, self._seconds - self._elapsed)))
                    self._note(self._progress())
            finally:
                self._over.set()
            for task in tasks:
                task.result()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _each(self, faults: Sequence[Fault], inject: Callable[[Fault], None]) -> None:
        for fault in faults:
            if self._over.wait(max(0.0, fault.at - self._elapsed)):
                return
            inject(fault)

    def _harvester_fault(self, fault: Fault) -> None:
        led_by = self._fleet.leader() if fault.leader else None
        while not (alive := self._fleet.alive):  # They have all ended, because a server was away when they started.
            if self._over.wait(_LOOK_SECONDS):
                return
        seat = alive[fault.victim % len(alive)] if led_by is None else led_by
        match fault.kind:
            case "kill":
                self._fleet.kill(seat)
            case "pause":
                self._fleet.pause(seat, fault.seconds)
            case _:
                self._fleet.terminate(seat)
        length = f" for {fault.seconds:.1f} s" if fault.kind == "pause" else ""
        self._count(fault.kind, f"harvester {seat}{', the leader' if led_by is not None else ''}{length}")

    def _broker_fault(self, fault: Fault) -> None:
        cluster = self._servers.cluster
        node = cluster.nodes[fault.victim]
        node.kill()
        self._count("broker", f"{node.name}, for {fault.seconds:.1f} s")
        self._over.wait(fault.seconds)
        cluster.restart(node)
        with suppress(KafkaException):  # Leadership goes back, so that the next one to die has some.
            for topic in (TOPIC, *COORDINATING_TOPICS):
                cluster.elect_preferred(topic)
        self._note(f"{node.name} is back and in sync")

    def _postgres_fault(self, fault: Fault) -> None:
        postgres = self._servers.postgres
        postgres.stop_immediately()
        self._count("postgres", f"stopped immediately, for {fault.seconds:.1f} s")
        self._over.wait(fault.seconds)
        postgres.launch()
        postgres.wait()

    def _count(self, kind: str, said: str) -> None:
        self._done[kind] += 1
        self._note(f"{kind} {said}")

    def _note(self, said: str) -> None:
        self._tell(f"{self._elapsed:5.0f} of {self._seconds:.0f} s: {said}")

    def _progress(self) -> str:
        return f"{self._writer.rows:,} rows committed, {len(self._reader.arrivals):,} arrived"

    def _drain(self) -> float:
        """Wait until the outbox is empty; returns the seconds that it took, or after which it was given up."""
        began = time.monotonic()
        while backlog := count_rows(self._settings):
            if time.monotonic() - began > DRAIN_SECONDS:
                self._failures.append(f"{backlog} rows were not drained within {DRAIN_SECONDS:.0f} s")
                break
            time.sleep(0.05)
        return time.monotonic() - began


def create_topic(settings: Settings, topic: str, partitions: int) -> None:
    """Make a topic with the broker's own number of replicas.

    Raises:
        KafkaException: the broker refused.
    """
    admin = AdminClient(client_config(settings))
    [future] = admin.create_topics([NewTopic(topic, num_partitions=partitions)]).values()
    future.result(20)


def count_rows(settings: Settings) -> int:
    """How many rows wait in the outbox.

    Raises:
        psycopg.OperationalError: Postgres is away.
    """
    query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(*settings.table.split(".")))
    with closing(psycopg.connect(settings.dsn.get_secret_value())) as connection:
        row = connection.execute(query).fetchone()
    return int(row[0]) if row else 0


def longest_silence(arrivals: Sequence[Arrival]) -> float:
    """The longest time, in seconds, between one arrival and the next."""
    return max((later.at - earlier.at for earlier, later in pairwise(arrivals)), default=0.0)
