"""Whole Kafka records from Spark: bytes that are no text, and partitions, arrive as they were."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.errors import InvalidEvent
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.columns import EventColumnWrong
from tests.harvesting import drained
from tests.integration.test_whole_records import PARTITIONS, Sent, records

pytestmark = [pytest.mark.integration, pytest.mark.spark]

NO_TEXT = b"\x00\xff\x80"
PAIR = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
EVENTS = StructType(
    [
        StructField("number", LongType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", ArrayType(PAIR)),
        StructField("partition", IntegerType()),
    ]
)
ROWS = 400


def some_bytes(chance: random.Random) -> bytes:
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 80))
    if kind == 1:
        return b"k" * chance.randrange(90, 110)
    return [b"", NO_TEXT, "Grüße".encode()][kind - 2]


def random_events() -> list[tuple[int, bytes, bytes | None, list[tuple[str, bytes | None]], int | None]]:
    chance = random.Random(20)
    return [
        (
            number,
            some_bytes(chance),
            chance.choice([None, some_bytes(chance)]),
            [("number", str(number).encode())]
            + [(chance.choice("ab"), chance.choice([None, some_bytes(chance)])) for _ in range(chance.randrange(3))],
            chance.choice([None, None, *range(PARTITIONS)]),
        )
        for number in range(ROWS)
    ]


def save(settings: Settings, events: DataFrame, **options: str) -> None:
    chosen: Mapping[str, str] = {"dsn": settings.dsn.get_secret_value(), **options}
    events.write.format("outbox").options(**chosen).mode("append").save()


def execute(settings: Settings, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        cursor = connection.execute(sql.SQL(query))
        return cursor.fetchall() if cursor.description else []


def by_number(found: list[Sent]) -> dict[int, Sent]:
    return {int(dict(reversed(each.headers))["number"] or b""): each for each in found}


@pytest.mark.parametrize("order", ["", "number", "decimal"])  # The last one is copied in another format.
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_random_records_arrive_as_they_were(
    order: str, delivery: str, spark: SparkSession, settings: Settings, topic: str
) -> None:
    given = random_events()
    events = spark.createDataFrame(given, EVENTS).withColumn("decimal", f.col("number").cast("decimal(20, 2)"))
    save(settings, events.repartition(3), topic=topic, jobId="j", **({"orderBy": order} if order else {}))
    with Harvester(settings.model_copy(update={"delivery": delivery})):
        drained(settings)
    assert execute(settings, "SELECT FROM outbox_parked UNION ALL SELECT FROM outbox_dead_letter") == []
    arrived = by_number(records(settings, topic))
    places = set()
    for number, key, value, headers, partition in given:
        record = arrived.pop(number)
        *own, (job, _), (sequence, place) = record.headers
        assert (record.key, record.value, own) == (key, value, headers)
        assert (job, sequence) == ("outbox-job", "outbox-sequence")
        assert partition in (None, record.partition)
        places.add(int(place or b""))
        assert not order or int(place or b"") == number + 1
    assert arrived == {}
    assert places == set(range(1, ROWS + 1))


def test_a_key_keeps_its_order_in_whichever_form_it_is(spark: SparkSession, settings: Settings, topic: str) -> None:
    as_bytes = spark.sql("SELECT X'6b' AS key, X'00ff' AS value")
    as_text = spark.sql("SELECT 'k' AS key, 'text' AS value")
    for rows in (as_bytes, as_text, as_bytes):
        OutboxWrite(settings).events(rows, topic).commit()
    assert execute(settings, "SELECT DISTINCT kafka_key FROM outbox") == [("k",)]
    with Harvester(settings):
        drained(settings)
    assert [record.value for record in records(settings, topic)] == [b"\x00\xff", b"text", b"\x00\xff"]


def test_bytes_that_are_texts_need_no_columns_of_their_own(spark: SparkSession, settings: Settings) -> None:
    rows = spark.sql("SELECT X'6b' AS key, X'76' AS value, map('h', X'61') AS headers, CAST(NULL AS INT) AS partition")
    OutboxWrite(settings).events(rows, "t").commit()
    columns = "kafka_key, kafka_value, kafka_header_values[1], kafka_value_bytes, kafka_header_bytes"
    assert execute(settings, f"SELECT {columns} FROM outbox") == [("k", "v", "a", None, None)]


def test_a_partition_that_cannot_be_is_refused_or_set_aside(spark: SparkSession, settings: Settings) -> None:
    wrong = spark.sql("SELECT X'00' AS key, X'00ff' AS value, -1 AS partition")
    with pytest.raises(InvalidEvent, match="partition: -1, expected 0 to 2147483647, of the event with topic 't'"):
        OutboxWrite(settings).events(wrong, "t").commit()
    assert OutboxWrite(settings).events(wrong, "t", on_bad_row="deadLetter").commit().set_aside == 1
    [letter] = operate.dead_letters(settings)
    assert execute(settings, "SELECT kafka_value, altered FROM outbox_dead_letter") == [
        (b"\x00\xff", ["key", "partition"])
    ]
    with pytest.raises(operate.DeadLetterAltered):
        operate.retry_dead_letters(settings, [letter.id])
    with pytest.raises(EventColumnWrong, match="the column 'partition' is string; expected an integer"):
        OutboxWrite(settings).events(spark.sql("SELECT 'k' AS key, 'v' AS value, '1' AS partition"), "t")


def test_a_partition_beside_a_business_row_is_a_column_of_it(spark: SparkSession, settings: Settings) -> None:
    execute(settings, "CREATE TABLE album (number INT, partition TEXT, picture BYTEA)")
    rows = spark.sql("SELECT X'00ff' AS key, 1 AS number, 'left' AS partition, X'00' AS picture, X'00ff' AS value")
    save(settings, rows, topic="t", businessTable="album")
    assert execute(settings, "SELECT number, partition, picture FROM album") == [(1, "left", b"\0")]
    columns = "kafka_key, kafka_key_bytes, kafka_value_bytes, kafka_partition"
    assert execute(settings, f"SELECT {columns} FROM outbox") == [("hex:00ff", b"\x00\xff", b"\x00\xff", None)]


def test_an_outbox_without_the_columns_takes_texts_alone(spark: SparkSession, settings: Settings) -> None:
    execute(settings, "ALTER TABLE outbox DROP COLUMN kafka_partition")
    with pytest.raises(InvalidEvent, match="value: has bytes that are not UTF-8, which the outbox cannot hold"):
        OutboxWrite(settings).events(spark.sql("SELECT 'k' AS key, X'ff' AS value"), "t").commit()
    with pytest.raises(InvalidEvent, match="partition: given, for which the outbox has no column"):
        OutboxWrite(settings).events(spark.sql("SELECT 'k' AS key, 'v' AS value, 0 AS partition"), "t").commit()
    elsewhere = spark.sql("SELECT 'k' AS key, 'v' AS value, 0 AS partition")
    OutboxWrite(settings).events(elsewhere, "t", on_bad_row="deadLetter").commit()
    with pytest.raises(operate.DeadLetterAltered):  # It would go to the key's own partition.
        operate.retry_dead_letters(settings, [letter.id for letter in operate.dead_letters(settings)])
    OutboxWrite(settings).events(spark.sql("SELECT 'k' AS key, X'76' AS value"), "t").commit()
    assert execute(settings, "SELECT kafka_value FROM outbox") == [("v",)]


def test_a_header_without_a_name_is_refused(spark: SparkSession, settings: Settings) -> None:
    """The harvester would park its key."""
    for name in ("''", "CAST(NULL AS STRING)"):
        headers = f"array(named_struct('key', {name}, 'value', 'x')) AS headers"
        with pytest.raises(InvalidEvent, match="headers: has one without a name, of the event with topic 't'"):
            OutboxWrite(settings).events(spark.sql(f"SELECT 'k' AS key, 'v' AS value, {headers}"), "t").commit()


def stream(spark: SparkSession, settings: Settings, folder: Path, *columns: str) -> None:
    """Emit two lines, `a` and `b`, as the first batch of a query; again, if it was emitted before."""
    if not (folder / "source").exists():
        (folder / "source").mkdir()
        (folder / "source" / "1.txt").write_text("a\nb\n")
    for commit in (folder / "checkpoint" / "commits").glob("*0*"):
        commit.unlink()
    options = {"dsn": settings.dsn.get_secret_value(), "topic": "t", "checkpointLocation": str(folder / "checkpoint")}
    rows = spark.readStream.schema("line string").text(str(folder / "source")).selectExpr("'k' AS key", *columns)
    rows.writeStream.format("outbox").options(**options).trigger(availableNow=True).start().awaitTermination()


@pytest.mark.parametrize(
    ("first", "second", "stored"),
    [
        (
            ("X'00ff' AS value", "0 AS partition"),
            ("X'00fe' AS value", "0 AS partition"),
            [(None, b"\x00\xff", 0), (None, b"\x00\xff", 0)],
        ),
        (
            ("line AS value", "if(line = 'a', 0, 1) AS partition"),
            ("line AS value", "if(line = 'a', 1, 0) AS partition"),
            [("a", None, 0), ("b", None, 1)],
        ),
    ],
    ids=["other bytes", "partitions change places"],
)
def test_a_repeated_batch_of_other_records_is_refused(
    spark: SparkSession,
    settings: Settings,
    tmp_path: Path,
    first: tuple[str, ...],
    second: tuple[str, ...],
    stored: list[tuple[str | None, bytes | None, int]],
) -> None:
    """Spark repeats the last batch; its number must stand for the same records."""
    stream(spark, settings, tmp_path, *first)
    stream(spark, settings, tmp_path, *first)
    columns = "kafka_value, kafka_value_bytes, kafka_partition"
    assert execute(settings, f"SELECT {columns} FROM outbox ORDER BY kafka_partition") == stored
    with pytest.raises(PySparkException, match="was emitted before: expected the same events again"):
        stream(spark, settings, tmp_path, *second)
