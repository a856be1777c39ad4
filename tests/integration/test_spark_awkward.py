"""Awkward frames, options and business tables: what Spark allows is stored as it is, or refused in one clear line."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from outbox_plugin import Settings
from outbox_plugin.errors import InvalidEvent
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.publish import InvalidRow
from tests.sparking import count

pytestmark = [pytest.mark.integration, pytest.mark.spark]


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")  # Spark needs no Kafka.
    migrate(settings)
    return settings


def execute(settings: Settings, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        cursor = connection.execute(sql.SQL(query))
        return cursor.fetchall() if cursor.description else []


def save(settings: Settings, events: DataFrame, **options: str) -> None:
    chosen = {"dsn": settings.dsn.get_secret_value(), "topic": "t", **options}
    events.write.format("outbox").options(**chosen).mode("append").save()


@pytest.mark.parametrize("column", ["key", "value", "placed_at", "document"])
def test_a_string_that_is_no_utf_8_is_a_bad_row_that_is_named(
    spark: SparkSession, settings: Settings, column: str
) -> None:
    wrong = "cast(X'61ff62' AS string)"
    values = {name: wrong if name == column else "'v'" for name in ("key", "value", "placed_at")}
    if column == "document":
        values["value"], column = f"struct({wrong} AS name)", "value"
    events = spark.range(1).selectExpr(*(f"{expression} AS {name}" for name, expression in values.items()))
    with pytest.raises(InvalidEvent, match=r"not UTF-8.*with topic 't' and key") as caught:
        OutboxWrite(settings).events(events, topic="t", order_by=["placed_at"]).commit()
    assert caught.value.field == column


@pytest.mark.parametrize(("wrong", "said"), [("'a\\u0000b'", "NUL"), ("cast(X'ff' AS string)", "not UTF-8")])
def test_so_it_is_in_a_business_row(spark: SparkSession, settings: Settings, wrong: str, said: str) -> None:
    execute(settings, "CREATE TABLE business (number INT, name TEXT)")
    rows = spark.range(1).selectExpr("7 AS number", f"{wrong} AS name")
    with pytest.raises(InvalidRow, match=f"column 'name': .*{said}.*, of the row with number '7'"):
        OutboxWrite(settings).table(rows, "business").commit()
    events = rows.selectExpr("'k7' AS key", "'v' AS value", "*")
    with pytest.raises(PySparkException, match=f"column 'name': .*{said}.*, of the event with topic 't' and key 'k7'"):
        save(settings, events, businessTable="business", onBadRow="deadLetter")
    assert (count(settings, "business"), count(settings, "outbox")) == (0, 0)


@pytest.mark.parametrize("zone", ["GMT+08:00", "UTC+8", "PST", "Z", "Asia/Singapore"])
def test_an_instant_is_the_same_in_each_time_zone_that_spark_takes(
    spark: SparkSession, settings: Settings, zone: str
) -> None:
    execute(settings, "CREATE TABLE business (at TIMESTAMPTZ)")
    before = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        rows = spark.sql("SELECT timestamp'2020-01-02T03:04:05.000006Z' AS at, 'k' AS key, struct(at) AS value")
        save(settings, rows, businessTable="business", orderBy="at")
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    [(value,)] = execute(settings, "SELECT kafka_value FROM outbox")
    assert value == '{"at":"2020-01-02T03:04:05.000006Z"}'
    assert execute(settings, "SELECT at = '2020-01-02 03:04:05.000006+00' FROM business") == [(True,)]
