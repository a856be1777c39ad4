"""A Spark session on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from dagster import ConfigurableResource
from pydantic import Field
from pyspark import SparkContext
from pyspark.sql import SparkSession

from outbox_plugin.embedded.java import spark_java_home


class SparkResource(ConfigurableResource[SparkSession]):
    """Gives an asset a Spark session of its own, and stops it afterwards."""

    master: str = Field(default="local[2]", description="Where Spark runs.")
    driver_memory: str = Field(default="1g", description="Heap of the driver, which runs the tasks in local mode.")

    @contextmanager
    def session(self) -> Iterator[SparkSession]:
        """A session whose Python workers run this interpreter; its scratch files are gone with it."""
        os.environ["JAVA_HOME"] = str(spark_java_home())
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        with tempfile.TemporaryDirectory(prefix="outbox-spark-") as scratch:
            builder = SparkSession.Builder().master(self.master).appName("outbox")
            for name, value in {
                "spark.driver.memory": self.driver_memory,
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.local.dir": scratch,
                "spark.sql.warehouse.dir": f"{scratch}/warehouse",
                "spark.sql.session.timeZone": "UTC",
                "spark.sql.shuffle.partitions": "4",
                "spark.log.level": "ERROR",
            }.items():
                builder = builder.config(name, value)
            session = builder.getOrCreate()
            try:
                yield session
            finally:
                session.stop()
                _end_jvm()


def _end_jvm() -> None:
    """End Spark's JVM, which would live as long as this process, and keep the first session's memory settings."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    gateway.shutdown()
    gateway.proc.stdin.close()  # Its sign to end.
    gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = None
