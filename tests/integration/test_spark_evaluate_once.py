"""A row and its event agree: what both are made of is evaluated once, whatever it calls, and never again."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_plugin import Settings
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.evaluate_once import EvaluationLost, evaluated_once
from outbox_plugin.spark.options import OptionWrong

pytestmark = [pytest.mark.integration, pytest.mark.spark]

ROWS = 200


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")  # Spark needs no Kafka.
    migrate(settings)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE business (number BIGINT, drawn TEXT, made TEXT, made_at TIMESTAMPTZ)")
    return settings


def orders(spark: SparkSession) -> DataFrame:
    """Each of them differs whenever it is evaluated."""
    draw = f.udf(lambda: str(uuid.uuid4()), "string")
    numbered = spark.range(0, ROWS, 1, 3).withColumnRenamed("id", "number")
    return numbered.select("number", f.rand().cast("string").alias("drawn"), draw().alias("made")).withColumn(
        "made_at", f.current_timestamp()
    )


def as_events(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("cast(number AS string) AS key", "struct(drawn, made, made_at) AS value")


def asked(settings: Settings, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        return connection.execute(sql.SQL(query)).fetchall()


AGREEING = """
    SELECT count(*), count(DISTINCT made), min(kafka_value::json ->> 'made_at') = max(kafka_value::json ->> 'made_at')
    FROM business JOIN outbox ON kafka_key = number::text
        AND kafka_value::json ->> 'drawn' = drawn AND kafka_value::json ->> 'made' = made
        AND (kafka_value::json ->> 'made_at')::timestamptz = made_at
"""

PATTERNS: dict[str, Callable[[DataFrame], tuple[DataFrame, DataFrame]]] = {
    "events are made of the rows": lambda made: (made, as_events(made)),
    "rows and events are made of something wider": lambda made: (
        made.where("number >= 0").select(*made.columns),
        as_events(made.where("number > -1")),
    ),
    "rows and events are joined with something": lambda made: (
        made,
        as_events(made.join(made.groupBy("number").agg(f.count("*").alias("times")), "number")),
    ),
    "a cached DataFrame": lambda made: (made.cache(), as_events(made)),
    "rows are read through a view": lambda made: (made, as_events(_view(made))),
    "what both are made of has a subquery": lambda made: (
        _chosen(made),
        as_events(_chosen(made)),
    ),
}


def _view(made: DataFrame) -> DataFrame:
    made.createOrReplaceTempView("made")
    return made.sparkSession.table("made")


def _chosen(made: DataFrame) -> DataFrame:
    _view(made)
    return made.sparkSession.sql("SELECT * FROM made WHERE number IN (SELECT id FROM range(1000) WHERE id > -1)")


SUBQUERIES = {
    "a value": "SELECT 'k' AS key, (SELECT max(made) FROM made) AS value",
    "a condition": "SELECT 'k' AS key, 'v' AS value FROM range(1) WHERE id IN (SELECT number FROM made)",
    "one within another": "SELECT 'k' AS key, (SELECT max(id) FROM range(9) WHERE id IN (SELECT number FROM made))"
    " || '' AS value",
}


@pytest.mark.parametrize("subquery", SUBQUERIES)
def test_what_both_are_made_of_is_refused_in_a_subquery(spark: SparkSession, settings: Settings, subquery: str) -> None:
    rows = orders(spark)
    _view(rows)
    write = OutboxWrite(settings).table(rows, "business").events(spark.sql(SUBQUERIES[subquery]), topic="t")
    with pytest.raises(OptionWrong, match=r"a subquery.*has what both are made of"):
        write.commit()
    assert asked(settings, "SELECT (SELECT count(*) FROM business), (SELECT count(*) FROM outbox)") == [(0, 0)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_row_and_its_event_agree(spark: SparkSession, settings: Settings, pattern: str) -> None:
    rows, events = PATTERNS[pattern](orders(spark))
    written = OutboxWrite(settings).table(rows, "business").events(events, topic="t").commit()
    assert (written.rows, written.events) == (ROWS, ROWS)
    assert asked(settings, AGREEING) == [(ROWS, ROWS, True)]


def test_what_is_lost_is_not_evaluated_again(spark: SparkSession, settings: Settings) -> None:
    """As when an executor is lost: to fail is right, as another evaluation would give other values."""
    rows = orders(spark)

    def read_after_a_loss() -> None:
        with evaluated_once(rows, as_events(rows)) as (once, events):
            first = once.collect()
            assert once.collect() == first
            blocks = spark._jvm.org.apache.spark.SparkEnv.get().blockManager().master()  # type: ignore[union-attr]
            blocks.removeRdd(once._jdf.queryExecution().analyzed().rdd().id(), True)
            events.collect()

    with pytest.raises(EvaluationLost, match="run the job again"):
        read_after_a_loss()


def test_nothing_is_kept_after_the_job(spark: SparkSession, settings: Settings) -> None:
    before = set(spark.sparkContext._jsc.getPersistentRDDs())
    rows = orders(spark)
    OutboxWrite(settings).table(rows, "business").events(as_events(rows), topic="t").commit()
    assert set(spark.sparkContext._jsc.getPersistentRDDs()) == before


def test_frames_that_have_nothing_in_common_are_left_as_they_are(spark: SparkSession) -> None:
    rows, events = spark.range(3), spark.createDataFrame([("k", "v")], "key string, value string")
    with evaluated_once(rows, events) as both:
        assert [frame.collect() for frame in both] == [rows.collect(), events.collect()]


def test_a_table_may_be_in_both_and_in_a_subquery(spark: SparkSession) -> None:
    """Only what is made of it could differ."""
    spark.range(3).createOrReplaceTempView("a_table")
    rows = spark.sql("SELECT * FROM a_table WHERE id > 0")
    events = spark.sql("SELECT 'k' AS key, (SELECT max(id) FROM a_table) || '' AS value")
    with evaluated_once(rows, events) as both:
        assert [frame.collect() for frame in both] == [rows.collect(), events.collect()]
