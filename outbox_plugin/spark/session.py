"""A Spark session that ends with its user: scratch files, JVM and all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from outbox_plugin.spark.sink import register

LOCAL = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "8",  # Spark's default of 200 is for a cluster.
    "spark.ui.enabled": "false",
}


@contextmanager
def spark_session(
    master: str = "local[2]", *, conf: Mapping[str, str] | None = None, java_home: str | None = None
) -> Iterator[SparkSession]:
    """A session that knows the format "outbox". If this process has a session already, that one is used and not ended.

    Args:
        master: Spark's master URL. With `local[…]`, workers run this process's Python, and no port is opened to the
            network.
        conf: Spark properties that take precedence over the ones set here.
        java_home: the Java installation for Spark's JVM. By default, JAVA_HOME or the PATH decides.
    """
    if running := SparkSession.getActiveSession():
        register(running)
        yield running
        return
    local = master.startswith("local")
    if java_home:
        os.environ["JAVA_HOME"] = java_home
    if local:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with tempfile.TemporaryDirectory(prefix="outbox-spark-") as scratch:
        ours = {
            **(LOCAL if local else {}),
            "spark.ui.showConsoleProgress": "false",
            "spark.local.dir": scratch,
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",  # By default in the working directory, which is shared.
            "spark.sql.session.timeZone": "UTC",
            "spark.log.level": "ERROR",
        }
        builder = SparkSession.Builder().master(master).appName("outbox")
        for name, value in {**ours, **(conf or {})}.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        try:
            register(session)
            yield session
        finally:
            _stop(session)
            _end_jvm()


def jvm_is_dead() -> bool:
    """Whether the JVM of this process's session has ended, as where the machine ran out of memory."""
    gateway = SparkContext._gateway
    return gateway is not None and gateway.proc is not None and gateway.proc.poll() is not None


def _stop(session: SparkSession) -> None:
    """Stop a session, also one whose JVM is dead. PySpark would use the dead session again."""
    for part in (session, session.sparkContext):
        with suppress(Py4JError, OSError):
            part.stop()
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def _end_jvm() -> None:
    """End Spark's JVM. Otherwise later sessions of this process would use it, with the first one's memory settings."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    gateway.shutdown()
    gateway.proc.stdin.close()  # This ends the JVM.
    gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = None
