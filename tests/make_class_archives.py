"""Makes the archives of Java's classes that are missing. Each takes about half a minute."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

from outbox_plugin.embedded.java import spark_java_home
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.spark.session import spark_session
from tests.class_archives import FOLDER, KAFKA, NO_OPTIMIZER, SPARK
from tests.processes import launched


def make(archive: Path, run: Callable[[str], None]) -> None:
    """Call `run` with the option by which a Java writes, at its end, the archive of what it has loaded."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        fresh = Path(scratch) / archive.name
        run(f"-XX:ArchiveClassesAtExit={fresh}")
        if fresh.exists():  # Some runtimes cannot write one.
            fresh.replace(archive)


def run_kafka(option: str) -> None:
    """Start a broker with the option, and stop it."""
    with tempfile.TemporaryDirectory() as folder:
        kafka = EmbeddedKafka(Path(folder), print)
        kafka.java_options = (*kafka.java_options, option)
        with launched(kafka):
            pass


def run_spark(option: str) -> None:
    """Do a little of all that the tests do with Spark, with the option."""
    conf = {"spark.driver.extraJavaOptions": shlex.quote(option)}
    with spark_session("local[2]", conf=conf, java_home=str(spark_java_home())) as spark:
        rows = spark.range(1000).selectExpr("id", "CAST(id AS string) AS key")
        rows.groupBy("key").count().orderBy("key").collect()
        rows.mapInArrow(lambda batches: batches, rows.schema).collect()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    os.environ["JDK_JAVA_OPTIONS"] = NO_OPTIMIZER
    os.environ.pop("SPARK_SUBMIT_OPTS", None)  # It names the archive that is not there yet.
    for archive, run in ((KAFKA, run_kafka), (SPARK, run_spark)):
        if not archive.exists():
            make(archive, run)
