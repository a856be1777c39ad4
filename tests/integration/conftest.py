"""One Spark session for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from outbox_plugin.embedded.java import spark_java_home
from outbox_plugin.spark.session import spark_session


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A task may be tried four times, as on a cluster."""
    conf = {"spark.sql.shuffle.partitions": "4"}
    with spark_session("local[2,4]", conf=conf, java_home=str(spark_java_home())) as session:
        yield session
