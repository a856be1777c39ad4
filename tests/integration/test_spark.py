"""Spark's business rows and events appear together or not at all, once, and in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from definitions.flights import create_flight_table, departure_events, read_flights
from outbox_plugin import Settings
from outbox_plugin.errors import InvalidEvent, UserError
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.columns import BusinessColumnWrong, EventColumnWrong, RowForm
from outbox_plugin.spark.staging import Attempt, StageTask, StagingTable
from tests.roles import as_role, let_in
from tests.spark_support import (
    count,
    events_of,
    failing,
    new_staging_table,
    numbers,
    outbox_rows,
    staging_tables,
    tables,
)

pytestmark = [pytest.mark.integration, pytest.mark.spark]


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")  # Spark needs no Kafka.
    migrate(settings)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE business (number BIGINT PRIMARY KEY, name TEXT)")
    return settings


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


def test_an_attempt_that_copied_all_its_rows_but_was_not_accepted_is_not_published(
    spark: SparkSession, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that lost to its speculated twin, or whose executor was lost before it could say that it had ended."""
    marker = tmp_path / "copied"

    def failing_once_copied(*arguments: Any) -> Callable[[Iterator[Any]], Attempt]:
        task = StageTask(*arguments)

        def stage(batches: Iterator[Any]) -> Attempt:
            staged = task(batches)
            with suppress(FileExistsError):
                marker.touch(exist_ok=False)
                raise RuntimeError("the task fails when its rows are committed")
            return staged

        return stage

    monkeypatch.setattr("outbox_plugin.spark.write.StageTask", failing_once_copied)
    written = OutboxWrite(settings).events(events_of(numbers(spark, 1_000)), topic="t").commit()
    assert marker.exists()  # It did fail.
    assert (written.events, count(settings, "outbox")) == (1_000, 1_000)
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
        new_staging_table(settings, running, "dead")
        owned = new_staging_table(settings, running, "running").name
        running.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", (owned,))
        OutboxWrite(settings).events(events_of(numbers(spark, 10)), topic="t").commit()
        assert staging_tables(settings) == {owned}


@pytest.mark.parametrize(
    ("row", "field", "said"),
    [
        (("t", "k" * 101), "key", "101 characters"),
        (("t", None), "key", "null, of the event with topic 't'"),
        (("no topic!", "k7"), "topic", "with topic 'no topic!' and key 'k7'"),
        ((None, "k7"), "topic", "with topic null and key 'k7'"),
    ],
)
def test_a_bad_row_fails_the_job_and_names_key_and_column(
    spark: SparkSession, settings: Settings, row: tuple[str | None, str | None], field: str, said: str
) -> None:
    """Among good rows, in a batch that is not the first: what the task has copied by then must not be seen."""
    before = tables(settings)
    schema = "topic string, key string"
    good = spark.range(0, 30_000, 1, 2).select(f.lit("t").alias("topic"), f.col("id").cast("string").alias("key"))
    events = good.union(spark.createDataFrame([row], schema)).coalesce(1).withColumn("value", f.lit("v"))
    with pytest.raises(InvalidEvent, match=said) as caught:
        OutboxWrite(settings, job_id="j").table(numbers(spark, 10), "business").events(events).commit()
    assert caught.value.field == field
    assert (count(settings, "outbox"), count(settings, "business"), count(settings, "outbox_job")) == (0, 0, 0)
    assert tables(settings) == before


def test_bytes_of_a_business_row_arrive_as_they_are(spark: SparkSession, settings: Settings) -> None:
    """Also those that read like an escape, or are no UTF-8."""
    contents = [b"abc", b"\\x41", b"a\\\\b", b"\xff\x00", b"", None]
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("CREATE TABLE file (attempt INT, ordinal INT, content BYTEA)")
    schema = "attempt int, ordinal int, content binary"
    rows = spark.createDataFrame([(1, n, content) for n, content in enumerate(contents)], schema)
    OutboxWrite(settings).table(rows, "file").commit()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        stored = connection.execute("SELECT content FROM file ORDER BY ordinal").fetchall()
    assert [content for (content,) in stored] == contents


def test_a_business_column_of_a_compound_type_is_refused_at_once(spark: SparkSession, settings: Settings) -> None:
    rows = numbers(spark, 1).withColumn("name", f.array("name"))
    with pytest.raises(BusinessColumnWrong, match="'name' is array<string>"):
        OutboxWrite(settings).table(rows, "business").commit()


def test_overwriting_with_a_condition_replaces_those_rows_alone(spark: SparkSession, settings: Settings) -> None:
    OutboxWrite(settings).table(numbers(spark, 10), "business").commit()
    rows = numbers(spark, 3).withColumn("name", f.lit("new"))
    where = sql.SQL("number < {}").format(5)
    OutboxWrite(settings).table(rows, "business", mode="overwrite", where=where).commit()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        found = connection.execute("SELECT number, name FROM business ORDER BY 1").fetchall()
    assert found == [(n, "new") for n in range(3)] + [(n, f"name-{n}") for n in range(5, 10)]


def test_headers_may_stand_as_sparks_kafka_sink_takes_them(spark: SparkSession, settings: Settings) -> None:
    schema = "key string, value string, headers array<struct<key:string,value:binary>>"
    rows = [("k1", "v", [("a", b"1"), ("b", "ü".encode()), ("a", b"2")]), ("k2", "v", None)]
    OutboxWrite(settings, job_id="j").events(spark.createDataFrame(rows, schema).coalesce(1), topic="t").commit()
    [(*_, names, texts), (*_, none, _)] = outbox_rows(settings)
    assert list(zip(names, texts, strict=True))[:3] == [("a", "1"), ("b", "ü"), ("a", "2")]
    assert none == ["outbox-job", "outbox-sequence"]


def test_another_roles_orphan_is_left_alone_and_harms_nobody(spark: SparkSession, settings: Settings) -> None:
    theirs, ours = (f"{role}_{os.getpid()}" for role in ("theirs", "ours"))
    dsn = settings.dsn.get_secret_value()
    with psycopg.connect(dsn, autocommit=True) as owner:
        try:
            for role in (theirs, ours):
                owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
                let_in(dsn, role)
                for what in ("SCHEMA outbox_staging", "ALL TABLES IN SCHEMA public", "ALL SEQUENCES IN SCHEMA public"):
                    owner.execute(sql.SQL(f"GRANT ALL ON {what} TO {{}}").format(sql.Identifier(role)))
            orphan = new_staging_table(settings, owner, "another")
            owner.execute(sql.SQL("ALTER TABLE {} OWNER TO {}").format(orphan.identifier, sql.Identifier(theirs)))
            of_ours = Settings(dsn=as_role(dsn, ours), bootstrap_servers="127.0.0.1:1")
            OutboxWrite(of_ours).events(events_of(numbers(spark, 10)), topic="t").commit()
            assert count(settings, "outbox") == 10
            assert orphan.name in tables(settings)
        finally:
            for role in (theirs, ours):
                owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
                owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def test_what_a_worker_is_handed_shows_no_password() -> None:
    task = StageTask("postgresql://user:hunter2@host/database", StagingTable("outbox", "staging", RowForm(())))
    assert "hunter2" not in repr(task)


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
