"""Servers of a file's own: a Spark session, and a broker that makes no topics on first use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from outbox_plugin.embedded.java import spark_java_home
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.spark.session import spark_session


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A task may be tried four times, as on a cluster."""
    conf = {"spark.sql.shuffle.partitions": "4"}
    with spark_session("local[2,4]", conf=conf, java_home=str(spark_java_home())) as session:
        yield session


class StrictKafka(EmbeddedKafka):
    """A broker that makes no topics on first use."""

    def properties(self, port: int, data: str) -> str:
        return (
            super().properties(port, data).replace("auto.create.topics.enable=true", "auto.create.topics.enable=false")
        )


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    kafka = StrictKafka(tmp_path_factory.mktemp("strict"), print)
    kafka.launch()
    kafka.wait()
    yield kafka.bootstrap_servers
    kafka.stop()
