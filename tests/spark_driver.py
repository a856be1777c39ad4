"""A Spark application of a process of its own, which a test can kill: `python -m tests.spark_driver batch|stream …`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_plugin import Settings
from outbox_plugin.embedded.java import spark_java_home
from outbox_plugin.spark.session import spark_session
from tests.processes import kill_tree
from tests.spark_support import events_of, numbers
from tests.support import PATIENCE

CHECKOUT = Path(__file__).resolve().parents[1]


def main() -> None:
    kind, *arguments = sys.argv[1:]
    with spark_session(java_home=str(spark_java_home())) as spark:
        if kind == "batch":
            run_batch(spark, *arguments)
        else:
            run_stream(spark, *arguments)


def run_batch(spark: SparkSession, job_id: str, rows: str, seconds: str = "0") -> None:
    """Emit `rows` events as one job, whose tasks take `seconds` each."""
    events = events_of(slow(numbers(spark, int(rows), partitions=2), float(seconds)))
    sink = events.write.format("outbox").option("topic", "t").option("orderBy", "number").option("jobId", job_id)
    sink.mode("append").save()


def run_stream(spark: SparkSession, folder: str, seconds: str = "0") -> None:
    """Emit an event per line of the folder's files, a batch per file, until all are."""
    files = spark.readStream.schema("number long").option("maxFilesPerTrigger", 1).json(f"{folder}/source")
    events = events_of(slow(files.withColumn("name", f.lit("n")), float(seconds)))
    sink = events.writeStream.format("outbox").option("topic", "t").option("orderBy", "number")
    query = sink.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
    query.awaitTermination()


def slow(rows: DataFrame, seconds: float) -> DataFrame:
    """`rows`, of which each task yields the last one only after `seconds`."""
    if not seconds:
        return rows

    def wait(batches: Iterator[object]) -> Iterator[object]:
        for batch in batches:
            yield batch
            time.sleep(seconds)

    return rows.mapInArrow(wait, rows.schema)


class Application:
    """A running driver. `kill` ends it together with its JVM and its workers."""

    def __init__(self, settings: Settings, *arguments: str) -> None:
        environment = {**os.environ, "OUTBOX_DSN": settings.dsn.get_secret_value()}
        command = [sys.executable, "-m", "tests.spark_driver", *arguments]
        self._process = psutil.Popen(
            command, cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def kill(self) -> None:
        """kill -9 all its processes at once, as when a machine is lost."""
        if self.alive:
            kill_tree(self._process)
        said, _ = self._process.communicate(timeout=30)
        print(said)  # Shown with the test's output.

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ends(self, seconds: float = 300) -> int:
        """Wait for its end; the exit code."""
        said, _ = self._process.communicate(timeout=seconds * PATIENCE)
        if self._process.returncode:
            print(said)  # Shown with the test's output.
        return int(self._process.returncode)


@contextmanager
def application(settings: Settings, *arguments: str) -> Iterator[Application]:
    running = Application(settings, *arguments)
    try:
        yield running
    finally:
        running.kill()


if __name__ == "__main__":
    main()
