"""One Spark session for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from outbox_plugin.spark import register
from resources.spark import SparkResource


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A task may be tried four times, as on a cluster."""
    with SparkResource(master="local[2,4]").session() as session:
        register(session)
        yield session
