"""How fast the sink is, against Spark's own JDBC append of the same rows into the same table, in one run.

The append is measured with its defaults, and with `reWriteBatchedInserts=true`; neither is atomic. During each write
of the sink, an application inserts single events. The time that its inserts take while the job commits is compared
with the time that they take when there is no job.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_plugin.bench.temporary_outbox import Tell, median_ratio
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.settings import Settings
from outbox_plugin.spark.kafka_source import add_packages
from outbox_plugin.spark.sink import COMMIT_PURPOSE

VALUE_BYTES = 200
QUIET_SECONDS, PAUSE_SECONDS = 5.0, 0.005
JDBC_DRIVER = "org.postgresql:postgresql:42.7.4"


@dataclass(frozen=True)
class SparkReport:
    """Rows per second of each round, and milliseconds that 99 % of an application's inserts took at most."""

    rows: int
    sink: list[float] = field(default_factory=list)
    append: list[float] = field(default_factory=list)
    rewriting_append: list[float] = field(default_factory=list)
    quiet_p99: list[float] = field(default_factory=list)
    committing_p99: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> dict[str, float]:
        """The sink over each append, and the wait beside a commit over the quiet one: medians of the rounds."""
        return {
            "append": median_ratio(self.sink, self.append),
            "rewriting_append": median_ratio(self.sink, self.rewriting_append),
            "p99": median_ratio(self.committing_p99, self.quiet_p99),
        }

    def lines(self) -> list[str]:
        """The report as lines of text."""
        ratios = self.ratios
        return [
            f"the sink is {ratios['append']:.2f} times as fast as the append, which is not atomic",
            f"            {ratios['rewriting_append']:.2f} times as fast as the append with reWriteBatchedInserts",
            f"an application's insert waits {ratios['p99']:.2f} times as long at p99 while the job commits",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "ratios": self.ratios}


def measure(spark: SparkSession, settings: Settings, rows: int, rounds: int, tell: Tell) -> SparkReport:
    """Write rows in each way, in turn, each time into an empty table.

    Args:
        spark: the session that writes.
        settings: how to reach the user's servers; the benchmark makes an outbox of its own there.
        rows: how many rows of about 200 bytes each write has.
        rounds: how many times each way is measured.
        tell: is called with each line of progress.

    Raises:
        InvalidSetting: Postgres's JDBC driver cannot be downloaded.
    """
    add_packages(spark, JDBC_DRIVER)
    events = _events(spark, rows)
    report = SparkReport(rows)
    with _scratch(settings) as scratch:
        ways: dict[str, tuple[list[float], Callable[[], None]]] = {
            "sink": (report.sink, lambda: _sink(events, scratch)),
            "JDBC append": (report.append, lambda: _append(events, scratch, rewriting=False)),
            "JDBC append, rewriting": (report.rewriting_append, lambda: _append(events, scratch, rewriting=True)),
        }
        few = _events(spark, max(rows // 10, 1))  # Warm: workers are started, classes loaded and compiled.
        _sink(few, scratch)
        _append(few, scratch, rewriting=True)
        for number in range(rounds):
            for name, (speeds, write) in ways.items():
                _empty(scratch)
                began = time.perf_counter()
                write()
                speeds.append(rows / (time.perf_counter() - began))
                tell(f"round {number + 1}: {name:22} {speeds[-1]:9,.0f} rows/s")
            _empty(scratch)
            quiet, committing = _waits(scratch, lambda: _sink(events, scratch))
            report.quiet_p99.append(_p99(quiet))
            report.committing_p99.append(_p99(committing))
            still, beside = _p99(quiet), _p99(committing)
            tell(f"round {number + 1}: p99 of an insert {still:.1f} ms, beside a commit {beside:.1f} ms")
    return report


def _events(spark: SparkSession, rows: int) -> DataFrame:
    return spark.range(0, rows, 1, 4).select(
        f.concat(f.lit("key-"), f.col("id") % 10_000).alias("key"),
        f.concat(f.lpad(f.col("id").cast("string"), 20, "0"), f.lit("x" * (VALUE_BYTES - 20))).alias("value"),
        f.create_map(f.lit("idempotency-key"), f.col("id").cast("string")).alias("headers"),
    )


def _sink(events: DataFrame, scratch: Settings) -> None:
    options = {"dsn": scratch.dsn.get_secret_value(), "table": scratch.table, "topic": "t"}
    events.write.format("outbox").options(**options).mode("append").save()


def _append(events: DataFrame, scratch: Settings, *, rewriting: bool) -> None:
    rows = events.select(
        f.current_timestamp().alias("create_time"),
        f.lit("t").alias("kafka_topic"),
        f.col("key").alias("kafka_key"),
        f.col("value").alias("kafka_value"),
        f.map_keys("headers").alias("kafka_header_keys"),
        f.map_values("headers").alias("kafka_header_values"),
    )
    given = conninfo_to_dict(scratch.dsn.get_secret_value())
    url = f"jdbc:postgresql://{given.get('host')}:{given.get('port', 5432)}/{given.get('dbname')}"
    options = {"user": str(given.get("user")), "password": str(given.get("password", ""))}
    writer = rows.write.format("jdbc").options(**options, driver="org.postgresql.Driver", dbtable=scratch.table)
    writer.option("url", f"{url}?reWriteBatchedInserts={str(rewriting).lower()}").mode("append").save()


def _waits(scratch: Settings, write: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Milliseconds that an application's single inserts took when all was quiet, and while the job committed."""
    taken: list[tuple[float, float]] = []  # When it began, and how long it took, in seconds.
    commits: list[tuple[float, float]] = []
    done = threading.Event()

    def insert() -> None:
        query = sql.SQL("INSERT INTO {} (kafka_topic, kafka_key, kafka_value) VALUES ('t', 'k', 'v')")
        with psycopg.connect(scratch.dsn.get_secret_value(), autocommit=True) as connection:
            composed = query.format(sql.Identifier(*scratch.table.split(".")))
            while not done.is_set():
                began = time.perf_counter()
                connection.execute(composed)
                taken.append((began, time.perf_counter() - began))
                done.wait(PAUSE_SECONDS)

    def watch() -> None:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND backend_xid IS NOT NULL"
        with psycopg.connect(scratch.dsn.get_secret_value(), autocommit=True) as connection:
            while not done.wait(0.01):
                before = time.perf_counter()
                row = connection.execute(query, (COMMIT_PURPOSE,)).fetchone()
                if row and row[0]:
                    commits.append((before, time.perf_counter()))

    threads = [threading.Thread(target=work) for work in (insert, watch)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(QUIET_SECONDS)
        loud = time.perf_counter()
        write()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    first, last = (commits[0][0], commits[-1][1]) if commits else (0.0, 0.0)
    quiet = [seconds * 1_000 for began, seconds in taken if began + seconds < loud]
    return quiet, [seconds * 1_000 for began, seconds in taken if began + seconds > first and began < last]


def _p99(milliseconds: list[float]) -> float:
    return quantiles(milliseconds, n=100)[98] if len(milliseconds) > 1 else 0.0


def _empty(scratch: Settings) -> None:
    with psycopg.connect(scratch.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(sql.SQL("TRUNCATE {}").format(sql.Identifier(*scratch.table.split("."))))
        connection.execute("CHECKPOINT")  # Otherwise one way would pay for the writes of the one before it.


@contextmanager
def _scratch(settings: Settings) -> Iterator[Settings]:
    """Settings with a temporary schema."""
    name = f"outbox_bench_{uuid.uuid4().hex[:8]}"
    scratch = settings.model_copy(update={"table": f"{name}.outbox"})
    with psycopg.connect(scratch.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        try:
            migrate(scratch)
            yield scratch
        finally:
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))
