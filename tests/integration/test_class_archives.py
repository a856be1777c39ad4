"""Spark starts from the archive of its classes: Java passes over one without a word, where it cannot use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.class_archives import SPARK

pytestmark = [pytest.mark.integration, pytest.mark.spark]


def test_spark_is_told_of_its_archive_and_has_no_folder_of_files_on_its_class_path(spark: SparkSession) -> None:
    assert spark.sparkContext._jvm is not None
    management = spark.sparkContext._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    assert f"-XX:SharedArchiveFile={SPARK}" in [*management.getInputArguments()]
    on_class_path = [Path(each) for each in management.getClassPath().split(os.pathsep)]
    assert not [each for each in on_class_path if each.is_dir() and any(each.iterdir())]
