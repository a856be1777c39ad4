"""Awkward frames, options and business tables: what Spark allows is stored as it is, or refused in one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from outbox_plugin import Settings, operate
from outbox_plugin.errors import InvalidEvent, InvalidSetting
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.business_table import BusinessTableMissing
from outbox_plugin.spark.columns import BusinessColumnWrong
from outbox_plugin.spark.options import OptionWrong
from outbox_plugin.spark.publish import InvalidRow, RowsDropped
from tests.spark_support import count

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


REFUSED = {
    "too long": ("'xyz'", 'value too long for type character varying\\(2\\): "xyz"'),
    "of no enum": ("'no'", 'invalid input value for enum mood: "no"'),
    "too large": ("cast(12345.6 AS decimal(9, 2))", "numeric field overflow"),
    "against a domain": ("-5", "violates check constraint"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_value_that_the_business_tables_type_refuses_is_named_in_one_line(
    spark: SparkSession, settings: Settings, what: str
) -> None:
    """Without another attempt of the task, which would come to the same."""
    execute(settings, "CREATE TYPE mood AS ENUM ('ok')")
    execute(settings, "CREATE DOMAIN positive AS int CHECK (value > 0)")
    kinds = dict(zip(REFUSED, ("varchar(2)", "mood", "numeric(5, 2)", "positive"), strict=True))
    execute(settings, f"CREATE TABLE business (number INT, stored {kinds[what]})")
    value, said = REFUSED[what]
    rows = spark.range(1).selectExpr("7 AS number", f"{value} AS stored")
    with pytest.raises(InvalidRow, match=f"^business row, column 'stored': .*{said}"):
        OutboxWrite(settings).table(rows, "business").commit()
    events = rows.selectExpr("'k7' AS key", "'v' AS value", "*")
    with pytest.raises(PySparkException, match=f"InvalidRow: business row, column 'stored': .*{said}"):
        save(settings, events, businessTable="business")
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


def set_aside(spark: SparkSession, settings: Settings, *events: str) -> dict[str, int]:
    """Have each of the events, a row of `key, value, headers` in SQL, set aside; the ids of their dead letters."""
    rows = spark.sql(f"SELECT * FROM VALUES {', '.join(events)} AS t(key, value, headers)").coalesce(1)
    save(settings, rows, onBadRow="deadLetter", jobId="j")
    return {letter.reason.partition(",")[0]: letter.id for letter in operate.dead_letters(settings)}


AWKWARD_EVENTS = {
    "key: null": "(CAST(NULL AS STRING), 'v', map('a', 'b'))",
    "key: has bytes that are not UTF-8": "(cast(X'61ff62' AS string), 'v', NULL)",
    "key: has the character NUL": "(cast(X'610062' AS string), 'v', NULL)",
    "value: has bytes that are not UTF-8": "('k', cast(X'61ff62' AS string), NULL)",
    "value: has the character NUL": "('k', cast(X'610062' AS string), NULL)",
    "headers: has bytes that are not UTF-8": "('k', 'v', map('a', cast(X'61ff62' AS string)))",
    "headers: has the character NUL": "('k', 'v', map('a', cast(X'610062' AS string)))",
    "key: 101 characters": "(repeat('k', 101), 'v', NULL)",
}


def test_a_dead_letter_that_is_not_what_the_event_was_is_not_retried(spark: SparkSession, settings: Settings) -> None:
    ids = set_aside(spark, settings, *AWKWARD_EVENTS.values())
    assert list(ids) == list(AWKWARD_EVENTS)
    for letter in ids.values():
        with pytest.raises(operate.DeadLetterAltered, match=f"dead letter {letter} cannot be emitted as it was"):
            operate.retry_dead_letters(settings, [letter])
    with pytest.raises(operate.DeadLetterAltered, match=f"dead letter {min(ids.values())} .*, nor can 7 others"):
        operate.retry_dead_letters(settings, list(ids.values()))
    assert operate.retry_dead_letters(settings) == 0
    assert (count(settings, "outbox"), count(settings, "outbox_dead_letter")) == (0, len(ids))
    values = execute(settings, "SELECT kafka_value FROM outbox_dead_letter WHERE reason LIKE 'value%' ORDER BY id")
    assert values == [(b"a\xffb",), (b"a\0b",)]


def test_what_can_be_retried_is_and_an_outbox_of_bytes_takes_any(spark: SparkSession, settings: Settings) -> None:
    ids = set_aside(spark, settings, *AWKWARD_EVENTS.values())
    execute(settings, "ALTER TABLE outbox ALTER kafka_value TYPE BYTEA USING NULL, ALTER kafka_key TYPE TEXT")
    assert operate.retry_dead_letters(settings) == 3
    emitted = execute(settings, "SELECT kafka_key, kafka_value FROM outbox ORDER BY id")
    assert emitted == [("k", b"a\xffb"), ("k", b"a\0b"), ("k" * 101, b"v")]
    left = {letter.id for letter in operate.dead_letters(settings)}
    assert left == {
        ids[reason] for reason in ids if "null" in reason or reason.startswith(("key: has", "headers: has"))
    }


def test_a_document_with_bytes_that_are_not_utf_8_is_not_retried(spark: SparkSession, settings: Settings) -> None:
    """Its bytes are lost: it became JSON."""
    rows = spark.sql("SELECT 'k' AS key, struct(cast(X'61ff62' AS string) AS name) AS value")
    save(settings, rows, onBadRow="deadLetter")
    [letter] = operate.dead_letters(settings)
    with pytest.raises(operate.DeadLetterAltered, match="value: has bytes that are not UTF-8"):
        operate.retry_dead_letters(settings, [letter.id])


def test_what_an_earlier_version_has_set_aside_is_not_retried_either(settings: Settings) -> None:
    """It put U+FFFD for what cannot be stored, and an empty key for none."""
    execute(
        settings,
        """
        ALTER TABLE outbox_dead_letter DROP COLUMN altered;
        DELETE FROM outbox_migration WHERE name = '0050_pre_dead_letters_as_they_were';
        INSERT INTO outbox_dead_letter (table_name, reason, row_id, create_time, kafka_topic, kafka_key, kafka_value,
                                        kafka_header_keys, kafka_header_values)
        VALUES ('outbox', 'value: has bytes that are not UTF-8, which', NULL, now(), 't', 'k', 'ab', '{}', '{}'),
               ('outbox', 'key: null, of the event', NULL, now(), 't', '', 'v', '{}', '{}'),
               ('outbox', 'a record that is too large', 17, now(), 't', '', 'v', '{}', '{}');
        """,
    )
    migrate(settings)
    assert operate.retry_dead_letters(settings) == 1
    assert [letter.key for letter in operate.dead_letters(settings)] == ["k", None]


def one_event(spark: SparkSession) -> DataFrame:
    return spark.range(1).selectExpr("'k' AS key", "'v' AS value", "'a name' AS name")


MISUSES: dict[str, tuple[Callable[[OutboxWrite, DataFrame], Any], str]] = {
    "two tables": (lambda write, rows: write.table(rows, "business").table(rows, "other"), "has one business table"),
    "two frames of events": (
        lambda write, rows: write.events(rows, topic="t").events(rows, topic="t"),
        "has one DataFrame of events",
    ),
    "another mode": (
        lambda write, rows: write.table(rows, "business", mode="OVERWRITE"),  # type: ignore[arg-type]
        "mode is 'OVERWRITE'; expected 'append' or 'overwrite'",
    ),
    "a condition without overwrite": (
        lambda write, rows: write.table(rows, "business", where=sql.SQL("true")),
        "needs mode='overwrite'",
    ),
    "a condition that is a text": (
        lambda write, rows: write.table(rows, "business", mode="overwrite", where="n < 5"),  # type: ignore[arg-type]
        "where is 'n < 5'; expected SQL",
    ),
    "an empty condition": (
        lambda write, rows: write.table(rows, "business", mode="overwrite", where=""),  # type: ignore[arg-type]
        "where is ''; expected SQL",
    ),
    "another policy": (
        lambda write, rows: write.events(rows, topic="t", on_bad_row="deadletter"),  # type: ignore[arg-type]
        "on_bad_row is 'deadletter'; expected 'fail' or 'deadLetter'",
    ),
    "a text as an order": (
        lambda write, rows: write.events(rows, topic="t", order_by="name"),
        r"order_by is 'name'; expected a list of columns, as \['name'\]",
    ),
    "nothing to write": (lambda write, rows: write.commit(), "nothing to write"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_write_that_is_used_wrongly_says_so(spark: SparkSession, settings: Settings, name: str) -> None:
    misuse, said = MISUSES[name]
    with pytest.raises(OptionWrong, match=said):
        misuse(OutboxWrite(settings), one_event(spark))


def test_an_empty_job_id_is_refused(spark: SparkSession, settings: Settings) -> None:
    """It would make the job one that cannot be repeated, and not say so."""
    with pytest.raises(InvalidSetting, match="job id: expected 1 to"):
        OutboxWrite(settings, job_id="")
    with pytest.raises(PySparkException, match="job id: expected 1 to"):
        save(settings, one_event(spark), jobId="")


def test_a_jobs_id_is_its_outboxs_own(spark: SparkSession, settings: Settings) -> None:
    """Outboxes of one schema share the table of jobs. What is run again writes nothing again."""
    other = settings.model_copy(update={"table": "other"})
    migrate(other)
    for outbox in (settings, other, settings):
        save(outbox, one_event(spark), jobId="sink", table=outbox.table)
        OutboxWrite(outbox, job_id="driver").events(one_event(spark), topic="t").commit()
    assert (count(settings, "outbox"), count(settings, "other")) == (2, 2)


def test_a_job_that_an_earlier_version_has_committed_is_not_run_again(spark: SparkSession, settings: Settings) -> None:
    execute(settings, "INSERT INTO outbox_job (job_id, events) VALUES ('old', 1)")
    save(settings, one_event(spark), jobId="old")
    assert OutboxWrite(settings, job_id="old").events(one_event(spark), topic="t").commit().again
    assert count(settings, "outbox") == 0


def refused(spark: SparkSession, settings: Settings, rows: DataFrame, said: str) -> None:
    """Both ways of writing a business row refuse it, and name why."""
    events = rows.selectExpr("'k' AS key", "'v' AS value", "*")
    for write in (
        lambda: OutboxWrite(settings).table(rows, "business").commit(),
        lambda: save(settings, events, businessTable="business"),
    ):
        with pytest.raises((BusinessTableMissing, BusinessColumnWrong, RowsDropped, PySparkException)) as caught:
            write()
        assert said in str(caught.value)
        assert "outbox migrate" not in str(caught.value)


def test_a_business_table_that_is_missing_is_named(spark: SparkSession, settings: Settings) -> None:
    refused(spark, settings, spark.sql("SELECT 1 AS number"), "there is no business table 'business'")


def test_so_is_a_column_that_it_lacks(spark: SparkSession, settings: Settings) -> None:
    execute(settings, "CREATE TABLE business (number INT)")
    said = "the business table 'business' lacks 'name'; it has 'number'"
    refused(spark, settings, spark.sql("SELECT 1 AS number, 'a' AS name"), said)


def test_bytes_are_not_stored_as_a_text_that_shows_them(spark: SparkSession, settings: Settings) -> None:
    execute(settings, "CREATE TABLE business (name TEXT)")
    refused(spark, settings, spark.sql("SELECT X'6162' AS name"), "the column 'name' is binary")


@pytest.mark.parametrize("what", ["INSERT", "INSERT OR UPDATE"])
def test_a_trigger_that_drops_rows_is_named(spark: SparkSession, settings: Settings, what: str) -> None:
    """To run the job again, as after a crash of Postgres, would not help."""
    execute(
        settings,
        f"""
        CREATE TABLE business (number BIGINT);
        CREATE FUNCTION drop_one() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN IF NEW.number = 1 THEN RETURN NULL; END IF; RETURN NEW; END $$;
        CREATE TRIGGER drop_one BEFORE {what} ON business FOR EACH ROW EXECUTE FUNCTION drop_one();
        """,
    )
    said = "the table 'business' took 1 of 2 rows: a trigger or a rule of its own drops rows"
    refused(spark, settings, spark.range(2).selectExpr("id AS number"), said)
    assert (count(settings, "business"), count(settings, "outbox")) == (0, 0)


@pytest.mark.parametrize("column", ["key", "value", "topic", "headers"])
def test_a_column_of_the_table_that_the_event_has_taken_is_named(
    spark: SparkSession, settings: Settings, column: str
) -> None:
    execute(settings, f"CREATE TABLE business (number INT, {column} TEXT)")
    rows = spark.sql("SELECT 1 AS number, 'k' AS key, 'v' AS value, 't' AS topic, map('a', 'b') AS headers")
    with pytest.raises(PySparkException, match=f"the business table 'business' has '{column}', which would be null"):
        save(settings, rows, businessTable="business")
    execute(settings, f"ALTER TABLE business ALTER COLUMN {column} SET DEFAULT 'the table''s own'")
    save(settings, rows, businessTable="business")
    assert execute(settings, f"SELECT {column} FROM business") == [("the table's own",)]


def test_names_may_have_a_per_cent_sign(spark: SparkSession, settings: Settings) -> None:
    execute(settings, 'CREATE TABLE "business%" ("pct%" INT, "%s" TEXT, "%(job_id)s" TEXT)')
    rows = spark.sql("SELECT 1 AS `pct%`, 'a' AS `%s`, 'b' AS `%(job_id)s`")
    OutboxWrite(settings).table(rows, "business%").commit()
    OutboxWrite(settings).table(rows, "business%", "overwrite", sql.SQL("\"%s\" LIKE 'a%'")).commit()
    save(settings, rows.selectExpr("'k' AS key", "'v' AS value", "*"), businessTable="business%", orderBy="pct%")
    assert execute(settings, 'SELECT * FROM "business%"') == [(1, "a", "b")] * 2
