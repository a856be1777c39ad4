"""`df.write.format("outbox")`: whatever Spark retries, rows and events appear together, once, and in order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_plugin import Settings
from outbox_plugin.schema.migrate import migrate
from tests.documents import blocks
from tests.spark_support import (
    count,
    events_of,
    failing,
    new_staging_table,
    numbers,
    outbox_rows,
    staging_tables,
)

pytestmark = [pytest.mark.integration, pytest.mark.spark]

GOHARVEST = """
CREATE TABLE outbox (
    id BIGSERIAL PRIMARY KEY, create_time TIMESTAMP WITH TIME ZONE NOT NULL, kafka_topic VARCHAR(249) NOT NULL,
    kafka_key VARCHAR(100) NOT NULL, kafka_value VARCHAR(10000), kafka_header_keys TEXT[] NOT NULL,
    kafka_header_values TEXT[] NOT NULL, leader_id UUID
)
"""


@pytest.fixture
def settings(dsn: str) -> Settings:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")  # Spark needs no Kafka.
    migrate(settings)
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE business (number BIGINT PRIMARY KEY, name TEXT, content BYTEA)")
    return settings


def save(settings: Settings, events: DataFrame, **options: str) -> None:
    chosen: Mapping[str, str] = {"dsn": settings.dsn.get_secret_value(), "topic": "t", **options}
    events.write.format("outbox").options(**chosen).mode("append").save()


def execute(settings: Settings, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        cursor = connection.execute(sql.SQL(query))
        return cursor.fetchall() if cursor.description else []


def test_all_that_an_event_can_be_arrives(spark: SparkSession, settings: Settings) -> None:
    rows = spark.sql("""
        SELECT * FROM VALUES
            ('k1', named_struct('text', 'a "quoted" \\\\ line\\n', 'number', 1.50BD,
                                'at', timestamp'2020-01-02 03:04:05.678Z',
                                'list', array(1, NULL), 'nothing', CAST(NULL AS string)), map('h', 'ü')),
            ('k2', NULL, NULL)
        AS t(key, value, headers)""").coalesce(1)
    save(settings, rows, jobId="j")
    [(key, value, names, texts), (second, tombstone, ours, _)] = outbox_rows(settings)
    assert (key, second, tombstone) == ("k1", "k2", None)
    assert json.loads(value or "") == {
        "text": 'a "quoted" \\ line\n',
        "number": 1.5,
        "at": "2020-01-02T03:04:05.678000Z",
        "list": [1, None],
        "nothing": None,
    }
    assert list(zip(names, texts, strict=True)) == [("h", "ü"), ("outbox-job", "j"), ("outbox-sequence", "1")]
    assert ours == ["outbox-job", "outbox-sequence"]
    assert staging_tables(settings) == set()


def test_what_was_written_to_kafka_is_written_here(spark: SparkSession, settings: Settings) -> None:
    """Bytes as Spark's Kafka source gives them, its array of headers, its topic column, and its options."""
    rows = spark.createDataFrame(
        [(b"k", "ü".encode(), [("a", b"1"), ("a", "ö".encode())], "t1")],
        "key binary, value binary, headers array<struct<key:string,value:binary>>, topic string",
    )
    options = {"kafka.bootstrap.servers": "kafka:9092", "dsn": settings.dsn.get_secret_value()}
    rows.write.format("outbox").options(**options).mode("append").save()
    [(key, value, names, texts)] = outbox_rows(settings)
    assert (key, value, names[:2], texts[:2]) == ("k", "ü", ["a", "a"], ["1", "ö"])
    assert execute(settings, "SELECT kafka_topic FROM outbox") == [("t1",)]


def test_an_outbox_whose_values_are_bytes_takes_them_too(spark: SparkSession, settings: Settings) -> None:
    execute(settings, "ALTER TABLE outbox ALTER COLUMN kafka_value TYPE BYTEA USING NULL")
    save(settings, spark.createDataFrame([("k", "ü"), ("k", None)], "key string, value string").coalesce(1))
    assert execute(settings, "SELECT kafka_value FROM outbox ORDER BY id") == [("ü".encode(),), (None,)]


def test_the_order_is_the_one_that_is_asked_for_also_after_repartitioning(
    spark: SparkSession, settings: Settings
) -> None:
    shuffled = events_of(numbers(spark, 5_000)).repartition(7, f.rand(1))
    save(settings, shuffled, orderBy="number")
    assert [int(key.removeprefix("key-")) for key, *_ in outbox_rows(settings)] == [n % 10 for n in range(5_000)]


def test_order_is_sparks_own(spark: SparkSession, settings: Settings) -> None:
    """Nulls first, and text byte by byte."""
    rows = spark.createDataFrame([("b",), ("B",), (None,), ("ä",), ("a",)], "place string")
    events = rows.select(f.lit("k").alias("key"), f.col("place").alias("value"), "place")
    save(settings, events.repartition(3), orderBy="place")
    expected = [row["place"] for row in rows.orderBy("place").collect()]
    assert [value for _, value, *_ in outbox_rows(settings)] == expected


def test_without_an_order_it_is_that_of_the_rows(spark: SparkSession, settings: Settings) -> None:
    save(settings, events_of(numbers(spark, 3_000, partitions=3)))
    written = [json.loads(value or "")["number"] for _, value, *_ in outbox_rows(settings)]
    assert written == list(range(3_000))


@pytest.mark.parametrize("last_key", ["k", None])
def test_places_count_on_over_the_partitions(spark: SparkSession, settings: Settings, last_key: str | None) -> None:
    """Also where partitions are uneven, or empty, or have a row that is set aside."""
    first = spark.range(0, 1_000, 1, 2).where("id < 700").union(spark.range(700, 705, 1, 1))
    events = first.select(f.lit("k").alias("key"), f.col("id").cast("string").alias("value"))
    last = spark.createDataFrame([("k", "705"), (last_key, "bad"), ("k", "706")], "key string, value string").coalesce(
        1
    )
    save(
        settings,
        spark.range(0, 1, 1, 3).where("false").selectExpr("'k' AS key", "'' AS value").union(events).union(last),
        onBadRow="deadLetter",
    )
    written = [(value, int(texts[-1])) for _, value, _, texts in outbox_rows(settings)]
    values = [str(number) for number in range(706)] + (["bad"] if last_key else []) + ["706"]
    assert written == [(value, place) for place, value in enumerate(values, 1)]


def test_business_rows_appear_with_their_events(spark: SparkSession, settings: Settings) -> None:
    rows = numbers(spark, 1_000).withColumn("content", f.encode("name", "utf-8"))
    events = rows.withColumn("key", f.col("name")).withColumn("value", f.struct("name"))
    save(settings, events, businessTable="business", orderBy="number")
    assert (count(settings, "business"), count(settings, "outbox")) == (1_000, 1_000)
    assert execute(settings, "SELECT name, content FROM business WHERE number = 7") == [("name-7", b"name-7")]


def test_a_business_row_that_is_refused_takes_the_events_with_it(spark: SparkSession, settings: Settings) -> None:
    rows = numbers(spark, 10).union(numbers(spark, 1)).withColumn("key", f.lit("k")).withColumn("value", f.lit("v"))
    with pytest.raises(PySparkException, match="duplicate key value"):
        save(settings, rows, businessTable="business")
    assert (count(settings, "business"), count(settings, "outbox"), count(settings, "outbox_job")) == (0, 0, 0)
    assert staging_tables(settings) == set()


def test_a_task_that_fails_half_way_and_is_retried_changes_nothing(
    spark: SparkSession, settings: Settings, tmp_path: Path
) -> None:
    save(settings, events_of(failing(numbers(spark, 1_000), tmp_path / "event", times=2)))
    assert len(list(tmp_path.iterdir())) == 2  # It did fail.
    assert len({value for _, value, *_ in outbox_rows(settings)}) == count(settings, "outbox") == 1_000


def test_a_job_that_fails_for_good_leaves_nothing_and_can_be_run_again(
    spark: SparkSession, settings: Settings, tmp_path: Path
) -> None:
    with pytest.raises(PySparkException):
        save(settings, events_of(failing(numbers(spark, 1_000), tmp_path / "event", times=100)), jobId="j")
    assert count(settings, "outbox") == 0
    for _ in range(2):
        save(settings, events_of(numbers(spark, 1_000)), jobId="j")
    assert count(settings, "outbox") == 1_000
    # Also what a task of the failed run that was still at work may have staged after it: the job's next run removes it.
    assert (staging_tables(settings), count(settings, "outbox_staging")) == (set(), 0)


def test_a_frame_without_rows_is_a_job_too(spark: SparkSession, settings: Settings) -> None:
    save(settings, spark.createDataFrame([], "key string, value string"), jobId="empty")
    assert execute(settings, "SELECT job_id, events FROM outbox_job") == [("empty", 0)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            ("k" * 101, "v"),
            "event key: 101 characters, of which 100 are allowed, of the event with topic 't' and key 'kk",
        ),
        ((None, "v"), "event key: null, of the event with topic 't' and key null"),
        (("k7", "v" * 10_001), "event value: 10001 characters, of which 10000 are allowed, of the event with .* 'k7'"),
        (("k7", "a\0b"), "event value: has the character NUL"),
        (("k7", b"\xff"), "event value: has bytes that are not UTF-8, which the outbox cannot hold, of .* key 'k7'"),
    ],
)
def test_a_bad_row_fails_the_job_and_names_key_and_column(
    spark: SparkSession, dsn: str, row: tuple[str | None, str | bytes], said: str
) -> None:
    """In goharvest's own table too, whose values are limited."""
    with psycopg.connect(dsn) as connection:
        connection.execute(GOHARVEST)
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    kind = "binary" if isinstance(row[1], bytes) else "string"
    good = spark.range(0, 20_000, 1, 2).selectExpr("cast(id as string) key", "'v' AS value")
    bad = spark.createDataFrame([row], f"key string, value {kind}").selectExpr("key", "cast(value as string) value")
    with pytest.raises(PySparkException, match=said):
        save(settings, good.union(bad))
    assert (count(settings, "outbox"), count(settings, "outbox_job"), staging_tables(settings)) == (0, 0, set())


def test_bad_rows_can_be_set_aside(spark: SparkSession, settings: Settings) -> None:
    bad = spark.createDataFrame([("k" * 101, "v"), ("nul", "a\0b"), (None, "v")], "key string, value string")
    good = spark.range(0, 1_000, 1, 2).selectExpr("cast(id as string) key", "'v' value")
    save(settings, good.union(bad), onBadRow="deadLetter", jobId="j")
    assert count(settings, "outbox") == 1_000
    aside = execute(
        settings, "SELECT kafka_topic, kafka_key, kafka_value, kafka_header_values FROM outbox_dead_letter ORDER BY id"
    )
    assert aside == [
        ("t", "k" * 101, b"v", ["j"]),
        ("t", "nul", b"a\0b", ["j"]),
        ("t", None, b"v", ["j"]),
    ]
    reasons = [str(reason) for (reason,) in execute(settings, "SELECT reason FROM outbox_dead_letter ORDER BY id")]
    assert ["101 characters" in reasons[0], "value: has the character NUL" in reasons[1]] == [True, True]
    assert reasons[2].startswith("key: null")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"job_id": "x"}, "the option 'job_id' is not known"),
        ({"onBadRow": "ignore"}, "'onBadRow' is 'ignore'; expected fail or deadLetter"),
        ({"orderBy": "when"}, "the events lack the column 'when'"),
        ({"dsn": "nonsense"}, "OUTBOX_DSN: not a Postgres URI"),
        ({"table": "not_there"}, "relation .* does not exist"),
        ({"businessTable": ""}, "the option 'businessTable' is empty"),
    ],
)
def test_what_cannot_be_done_is_said(
    spark: SparkSession, settings: Settings, options: dict[str, str], said: str
) -> None:
    with pytest.raises(PySparkException, match=said):
        save(settings, events_of(numbers(spark, 1)), **options)
    with pytest.raises(PySparkException, match="an outbox is only appended to"):
        events_of(numbers(spark, 1)).write.format("outbox").option("topic", "t").mode("overwrite").save()


def test_staging_tables_go_with_their_lease(spark: SparkSession, settings: Settings) -> None:
    """What a killed driver leaves: the next run of its job removes it, and any other one when the lease has run out."""
    made = {}
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        for name, job, lease in (
            ("ran_out", "a", "-1 s"),
            ("leased", "b", "1 h"),
            ("earlier", "mine", "1 h"),
            ("busy", "c", "-1 s"),
        ):
            made[name] = new_staging_table(settings, connection, job)
            until = "UPDATE outbox_staging SET leased_until = now() + %s::interval WHERE name = %s"
            connection.execute(until, (lease, made[name].name))
        with connection.transaction():
            # As a task does.
            connection.execute(sql.SQL("INSERT INTO {} (kafka_key) VALUES ('')").format(made["busy"].identifier))
            save(settings, events_of(numbers(spark, 10)), jobId="mine")
            assert staging_tables(settings) == {made["leased"].name, made["busy"].name}
    migrate(settings)
    assert staging_tables(settings) == {made["leased"].name}
    assert execute(settings, "SELECT name FROM outbox_staging") == [(made["leased"].name,)]


def test_a_password_is_not_shown(spark: SparkSession, settings: Settings) -> None:
    """Neither in an error nor in a plan."""
    password = str(conninfo_to_dict(settings.dsn.get_secret_value())["password"])
    with pytest.raises(PySparkException) as caught:
        save(settings, numbers(spark, 1))
    assert password not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.* is currently in beta")  # Dagster's own call.
def test_the_blocks_of_the_page_write(
    spark: SparkSession, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch, a stream, and rows with their events."""
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    execute(settings, "CREATE TABLE orders (customer TEXT, placed_at TIMESTAMPTZ)")
    orders = spark.sql("SELECT 'ann' AS key, '{}' AS value, current_timestamp() AS placed_at")
    orders.write.parquet(str(tmp_path / "source"))
    new_orders = spark.readStream.schema(orders.schema).parquet(str(tmp_path / "source")).select("key", "value")
    rows = spark.sql("SELECT 'ann' AS customer, current_timestamp() AS placed_at")
    names = {"spark": spark, "orders": orders, "new_orders": new_orders, "rows": rows}
    # The session's environment is of before the test.
    own = f'format("outbox").option("dsn", "{settings.dsn.get_secret_value()}")'
    for block in blocks("how-to/emit-from-spark.md", "python"):
        text = block.text.replace("…", str(tmp_path / "checkpoint")).replace('format("outbox")', own)
        exec(compile(text, "docs", "exec", dont_inherit=True), names)
        for stream in spark.streams.active:
            stream.processAllAvailable()
            stream.stop()
    assert count(settings, "outbox") == 3
    assert count(settings, "orders") == 1
