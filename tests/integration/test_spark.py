"""Spark's business rows and events appear together or not at all, once, and in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from definitions.flights import create_flight_table, departure_events, read_flights
from outbox_plugin import Settings
from outbox_plugin.errors import UserError
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.columns import EventColumnWrong
from resources.spark import SparkResource

pytestmark = [pytest.mark.integration, pytest.mark.spark]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """One session for all; a task may be tried four times, as on a cluster."""
    with SparkResource(master="local[2,4]").session() as session:
        yield session


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")  # Spark needs no Kafka.
    migrate(settings)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE business (number BIGINT PRIMARY KEY, name TEXT)")
    return settings


def outbox_rows(settings: Settings) -> list[tuple[str, str | None, list[str], list[str]]]:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        columns = "kafka_key, kafka_value, kafka_header_keys, kafka_header_values"
        return connection.execute(f"SELECT {columns} FROM outbox ORDER BY id").fetchall()


def count(settings: Settings, table: str) -> int:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(row[0]) if row else 0


def tables(settings: Settings) -> set[str]:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        return {name for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")}


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


def test_values_headers_and_tombstones_arrive_as_they_are(spark: SparkSession, settings: Settings) -> None:
    awkward = 'a "quoted", \\ backslashed\n{line}'
    events = spark.createDataFrame(
        [("k1", awkward, {"name": awkward, "empty": ""}), ("k2", None, {}), ("k3", "", None)],
        "key string, value string, headers map<string,string>",
    ).coalesce(1)
    written = OutboxWrite(settings, job_id="j").events(events, topic="t").commit()
    assert (written.events, written.rows, written.again) == (3, 0, False)
    ours = ["outbox-job", "outbox-sequence"]
    [first, second, third] = outbox_rows(settings)
    assert first[:2] == ("k1", awkward)
    assert dict(zip(first[2], first[3], strict=True)) == {
        "name": awkward,
        "empty": "",
        "outbox-job": "j",
        "outbox-sequence": "1",
    }
    assert second == ("k2", None, ours, ["j", "2"])
    assert third == ("k3", "", ours, ["j", "3"])


def test_events_are_in_the_order_that_is_asked_for(spark: SparkSession, settings: Settings) -> None:
    shuffled = events_of(numbers(spark, 5_000)).repartition(7, f.rand(1))
    OutboxWrite(settings).events(shuffled, topic="t", order_by=["number"]).commit()
    rows = outbox_rows(settings)
    assert [int(key.removeprefix("key-")) for key, *_ in rows] == [number % 10 for number in range(5_000)]
    assert [headers[-1] for *_, headers in rows] == [str(number + 1) for number in range(5_000)]


@pytest.mark.parametrize("order_by", [[], ["number"]])
def test_a_task_that_fails_half_way_and_is_retried_changes_nothing(
    spark: SparkSession, settings: Settings, tmp_path: Path, order_by: list[str]
) -> None:
    business = numbers(spark, 1_000)
    events = events_of(failing(business, tmp_path / "event", times=2))
    rows = failing(business, tmp_path / "row", times=1)
    written = OutboxWrite(settings).table(rows, "business").events(events, topic="t", order_by=order_by).commit()
    assert (written.rows, written.events) == (1_000, 1_000)
    assert (count(settings, "business"), count(settings, "outbox")) == (1_000, 1_000)
    assert len(list(tmp_path.iterdir())) == 3  # It did fail.
    assert len({value for _, value, *_ in outbox_rows(settings)}) == 1_000


def test_a_job_that_fails_for_good_leaves_nothing_visible(
    spark: SparkSession, settings: Settings, tmp_path: Path
) -> None:
    before = tables(settings)
    business = numbers(spark, 1_000)
    events = events_of(failing(business, tmp_path / "event", times=100))
    with pytest.raises(PySparkException):
        OutboxWrite(settings, job_id="j").table(business, "business").events(events, topic="t").commit()
    assert (count(settings, "business"), count(settings, "outbox")) == (0, 0)
    assert tables(settings) == before
    again = (
        OutboxWrite(settings, job_id="j").table(business, "business").events(events_of(business), topic="t").commit()
    )
    assert (again.rows, again.events, again.again) == (1_000, 1_000, False)


def test_a_business_row_that_is_refused_takes_the_events_with_it(spark: SparkSession, settings: Settings) -> None:
    twice = numbers(spark, 10).union(numbers(spark, 10))
    with pytest.raises(UserError, match="duplicate key value"):
        OutboxWrite(settings).table(twice, "business").events(events_of(numbers(spark, 10)), topic="t").commit()
    assert (count(settings, "business"), count(settings, "outbox")) == (0, 0)


def test_a_job_that_is_run_again_under_its_id_writes_nothing(spark: SparkSession, settings: Settings) -> None:
    def run() -> bool:
        business = numbers(spark, 100)
        write = OutboxWrite(settings, job_id="nightly").table(business, "business")
        return write.events(events_of(business), topic="t").commit().again

    assert [run(), run()] == [False, True]
    assert (count(settings, "business"), count(settings, "outbox")) == (100, 100)


def test_overwriting_replaces_the_rows(spark: SparkSession, settings: Settings) -> None:
    for rows in (100, 20):
        OutboxWrite(settings).table(numbers(spark, rows), "business", mode="overwrite").commit()
    assert count(settings, "business") == 20


def test_staging_tables_of_a_driver_that_died_are_removed_by_the_next_job(
    spark: SparkSession, settings: Settings
) -> None:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as running:
        running.execute("CREATE TABLE outbox_staging_dead (x int)")
        running.execute("CREATE TABLE outbox_staging_running (x int)")
        running.execute("SELECT pg_advisory_lock(hashtextextended('outbox_staging_running', 0))")
        OutboxWrite(settings).events(events_of(numbers(spark, 10)), topic="t").commit()
        assert {name for name in tables(settings) if "staging" in name} == {"outbox_staging_running"}


def test_a_key_that_is_too_long_fails_the_job_and_names_the_column(spark: SparkSession, settings: Settings) -> None:
    events = spark.createDataFrame([("k" * 101, "v")], "key string, value string")
    with pytest.raises(PySparkException, match="value too long for type character varying") as caught:
        OutboxWrite(settings).events(events, topic="t").commit()
    assert "kafka_key" in str(caught.value)
    assert count(settings, "outbox") == 0


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("value string", "lack the column 'key'"),
        ("key string, value int", "the column 'value' is int"),
        ("key string, value string, headers string", "the column 'headers' is string"),
    ],
)
def test_events_of_a_wrong_form_are_refused_at_once(
    spark: SparkSession, settings: Settings, schema: str, said: str
) -> None:
    with pytest.raises(EventColumnWrong, match=said):
        OutboxWrite(settings).events(spark.createDataFrame([], schema), topic="t").commit()


def test_the_flights_of_2013_are_what_they_are_known_to_be(
    spark: SparkSession, settings: Settings, tmp_path: Path
) -> None:
    """The package's own figures: 336,776 flights, 8,255 cancelled, 2,512 without a tail number."""
    flights = read_flights(spark, tmp_path).cache()
    events = departure_events(flights, "job")
    assert flights.count() == 336_776
    assert flights.where("departed_at IS NULL").count() == 8_255
    assert flights.where("tail_number IS NULL").count() == 2_512
    assert flights.where("tail_number IS NULL AND departed_at IS NOT NULL").count() == 0
    assert flights.select("tail_number").distinct().count() == 4_044  # One of them is none.
    assert events.count() == 328_521
    assert events.select(f.col("headers")["idempotency-key"]).distinct().count() == 328_521
    late = flights.where("carrier = 'HA' AND number = 51 AND delay_minutes = 1301").first()
    assert late is not None
    assert str(late["scheduled_at"]) == "2013-01-09 14:00:00"
    assert str(late["departed_at"]) == "2013-01-10 11:41:00"
    create_flight_table(settings.dsn.get_secret_value())
    january = flights.where("scheduled_at < '2013-01-02T05:00:00Z'")
    OutboxWrite(settings).table(january, "flight", mode="overwrite").commit()
    assert count(settings, "flight") == january.count()
