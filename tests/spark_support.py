"""Helpers for tests of Spark: they make rows, events and failures, and read tables."""

from __future__ import annotations

import uuid
from pathlib import Path

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from outbox_plugin import Settings
from outbox_plugin.spark.columns import event_form
from outbox_plugin.spark.staging import PREFIX, SCHEMA, StagingTable

# The connector of the Spark that is locked, and the newest of its companion that every registry has.
PACKAGES = "org.apache.spark:spark-sql-kafka-0-10_2.13,org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0"


def outbox_rows(settings: Settings) -> list[tuple[str, str | None, list[str], list[str]]]:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        columns = "kafka_key, kafka_value, kafka_header_keys, kafka_header_values"
        return connection.execute(f"SELECT {columns} FROM outbox ORDER BY id").fetchall()


def count(settings: Settings, table: str) -> int:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(row[0]) if row else 0


def tables(settings: Settings) -> set[str]:
    return _tables(settings, "public") | staging_tables(settings)


def staging_tables(settings: Settings) -> set[str]:
    return _tables(settings, SCHEMA)


def _tables(settings: Settings, schema: str) -> set[str]:
    query = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        return {name for (name,) in connection.execute(query, (schema,))}


def new_staging_table(settings: Settings, connection: psycopg.Connection, job_id: str) -> StagingTable:
    """A staging table of a job, without an owner and with any form."""
    form = event_form(StructType([StructField("key", StringType()), StructField("value", StringType())]), "t")
    table = StagingTable(settings.table, f"{PREFIX}{uuid.uuid4().hex}", form)
    table.create(connection, job_id)
    return table


def numbers(spark: SparkSession, rows: int, partitions: int = 4) -> DataFrame:
    return spark.range(0, rows, 1, partitions).select(
        f.col("id").alias("number"), f.concat(f.lit("name-"), f.col("id")).alias("name")
    )


def events_of(business: DataFrame) -> DataFrame:
    return business.select(
        f.concat(f.lit("key-"), f.col("number") % 10).alias("key"), f.struct("*").alias("value"), "number"
    )


def failing(rows: DataFrame, marker: Path, times: int) -> DataFrame:
    """`rows`, but the task that reads number 700 fails half-way, the first `times` times."""

    def may_fail(number: int) -> int:
        if number == 700:
            tries = len(list(marker.parent.glob(f"{marker.name}-*")))
            if tries < times:
                Path(f"{marker}-{tries}").touch()
                raise RuntimeError("the task fails half-way")
        return number

    return rows.withColumn("number", f.udf(lambda number: may_fail(number), "bigint")("number"))
