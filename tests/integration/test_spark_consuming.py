"""Ranges and streams consumed with Spark: each record's effect once, whatever is retried, run again, or restarted."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from psycopg import sql
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_plugin import Settings
from outbox_plugin.consuming import TopicRange, set_position
from outbox_plugin.consuming.positions import RangeMoved, lock_and_advance, read_position
from outbox_plugin.consuming.spark import Write, consume_range_with_spark, foreach_batch, position_condition
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import plan
from outbox_plugin.errors import TopicReplaced
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.spark.kafka_source import add_packages
from outbox_plugin.spark.options import OptionWrong
from tests.documents import blocks
from tests.inbox_support import produce, query
from tests.spark_support import PACKAGES, failing, outbox_rows, staging_tables
from tests.support import eventually

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(900)]

CONSUMER = "totals"
ADD = sql.SQL("(key) DO UPDATE SET records = total.records + excluded.records, amount = total.amount + excluded.amount")


@pytest.fixture
def shop(settings: Settings, spark: SparkSession) -> Settings:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("CREATE TABLE total (key TEXT PRIMARY KEY, records BIGINT, amount BIGINT)")
    return settings.model_copy(update={"spark_packages": PACKAGES})


def totals(settings: Settings, change: Callable[[DataFrame], DataFrame] = lambda rows: rows) -> Write:
    """Adds each record to the row of its key."""

    def write(records: DataFrame) -> OutboxWrite:
        numbers = change(
            records.select(f.col("key").cast("string"), f.col("value").cast("string").cast("long").alias("number"))
        )
        rows = numbers.groupBy("key").agg(f.count("*").alias("records"), f.sum("number").alias("amount"))
        return OutboxWrite(settings).table(rows, "total", on_conflict=ADD)

    return write


def numbered(first: int, count: int) -> list[tuple[str, str]]:
    return [(f"key-{number % 10}", str(number)) for number in range(first, first + count)]


def next_range(settings: Settings, topic: str, most: int = 100_000) -> TopicRange:
    found = plan(CONSUMER, topic, read_position(settings, CONSUMER, topic), topic_state(settings, topic), most).range
    assert found is not None
    return found


def seen(settings: Settings) -> tuple[int, int]:
    [(records, amount)] = query(
        settings, "SELECT coalesce(sum(records), 0)::int, coalesce(sum(amount), 0)::int FROM total"
    )
    return records, amount


def expected(count: int) -> tuple[int, int]:
    return count, count * (count - 1) // 2


def test_ranges_with_retried_tasks_and_repeated_runs_have_each_effect_once(
    spark: SparkSession, shop: Settings, topic: str, tmp_path: Path
) -> None:
    produce(shop, topic, numbered(0, 1000))
    ranges = []
    write = totals(shop, lambda rows: failing(rows, tmp_path / "marker", 2))
    while (found := plan(CONSUMER, topic, read_position(shop, CONSUMER, topic), topic_state(shop, topic), 400)).range:
        done = consume_range_with_spark(spark, shop, found.range, write)
        assert (done.again, done.lost) == (False, 0)
        ranges.append(found.range)
    assert len(ranges) == 3
    assert len(list(tmp_path.glob("marker-*"))) == 2  # The task did fail.
    for each in ranges:
        assert consume_range_with_spark(spark, shop, each, write).again
    assert seen(shop) == expected(1000)
    assert not staging_tables(shop)


def test_two_runs_of_one_range_at_the_same_time_have_one_effect(
    spark: SparkSession, shop: Settings, topic: str
) -> None:
    produce(shop, topic, numbered(0, 500))
    wanted = next_range(shop, topic)
    add_packages(spark, PACKAGES)
    with ThreadPoolExecutor(2) as runs:
        done = list(runs.map(lambda _: consume_range_with_spark(spark, shop, wanted, totals(shop)), range(2)))
    assert sorted(each.again for each in done) == [False, True]
    assert seen(shop) == expected(500)


def test_a_part_that_another_run_consumed_meanwhile_is_not_consumed_again(
    spark: SparkSession, shop: Settings, topic: str
) -> None:
    produce(shop, topic, numbered(0, 100))
    small, large = next_range(shop, topic, 40), next_range(shop, topic)
    write = totals(shop)

    def overtaken(records: DataFrame) -> OutboxWrite:
        consume_range_with_spark(spark, shop, small, write)
        return write(records)

    with pytest.raises(RangeMoved, match="run it again"):
        consume_range_with_spark(spark, shop, large, overtaken)
    assert not consume_range_with_spark(spark, shop, large, write).again
    assert seen(shop) == expected(100)


def test_rows_events_and_position_are_committed_together(spark: SparkSession, shop: Settings, topic: str) -> None:
    produce(shop, topic, numbered(0, 100))
    wanted = next_range(shop, topic)

    def write(records: DataFrame) -> OutboxWrite:
        events = records.select(f.col("key").cast("string"), f.col("value").cast("string"))
        return totals(shop)(records).events(events, topic="forwarded")

    with psycopg.connect(shop.dsn.get_secret_value()) as connection:
        connection.execute("ALTER TABLE total ADD CHECK (key <> 'key-3')")
    with pytest.raises(Exception, match="check constraint"):
        consume_range_with_spark(spark, shop, wanted, write)
    assert (seen(shop), outbox_rows(shop), read_position(shop, CONSUMER, topic)) == ((0, 0), [], None)
    query(shop, "ALTER TABLE total DROP CONSTRAINT total_key_check")
    for _ in range(2):
        consume_range_with_spark(spark, shop, wanted, write)
    assert seen(shop) == expected(100)
    assert sorted(int(value or -1) for _, value, *_ in outbox_rows(shop)) == list(range(100))


def test_deleted_records_are_counted_also_where_none_is_left(spark: SparkSession, shop: Settings, topic: str) -> None:
    produce(shop, topic, numbered(0, 300))
    wanted = next_range(shop, topic)
    admin = AdminClient({"bootstrap.servers": shop.bootstrap_servers})

    def delete(*upto: int) -> int:
        before = topic_state(shop, topic).first
        futures = admin.delete_records([TopicPartition(topic, n, offset) for n, offset in enumerate(upto)])
        return int(sum(future.result(60).low_watermark for future in futures.values()) - sum(before.values()))

    deleted = delete(5, 7, 0)
    done = consume_range_with_spark(spark, shop, wanted, totals(shop))
    assert (deleted, done.lost, seen(shop)[0]) == (12, 12, 288)
    produce(shop, topic, numbered(300, 30))
    wanted = next_range(shop, topic)
    delete(*(end for _, end in sorted(topic_state(shop, topic).end.items())))
    done = consume_range_with_spark(spark, shop, wanted, totals(shop))
    assert (done.lost, done.again, seen(shop)[0]) == (30, False, 288)
    position = read_position(shop, CONSUMER, topic)
    assert position is not None
    assert position.lost == 42


def test_a_write_with_a_job_id_is_refused(spark: SparkSession, shop: Settings, topic: str) -> None:
    produce(shop, topic, numbered(0, 10))

    def write(records: DataFrame) -> OutboxWrite:
        return OutboxWrite(shop, job_id="mine").table(records.select(f.lit("k").alias("key")), "total")

    with pytest.raises(OptionWrong, match="leave it out"):
        consume_range_with_spark(spark, shop, next_range(shop, topic), write)


def test_a_batch_of_two_topics_of_which_one_was_consumed_meanwhile_moves_neither(shop: Settings, topic: str) -> None:
    first, second = (TopicRange(CONSUMER, each, "id", {0: 0}, {0: 10}) for each in (topic, "other"))
    with psycopg.connect(shop.dsn.get_secret_value()) as connection:
        assert lock_and_advance(connection, shop.table, second)
    with (
        pytest.raises(RangeMoved, match="a part of the batch"),
        psycopg.connect(shop.dsn.get_secret_value()) as connection,
    ):
        position_condition(shop, [(first, 0), (second, 0)])(connection)
    assert read_position(shop, CONSUMER, topic) is None


class Stream:
    """A stream that reads the topic to its end, and its checkpoint."""

    def __init__(self, spark: SparkSession, settings: Settings, topic: str, folder: Path) -> None:
        add_packages(spark, PACKAGES)
        self._spark, self._settings, self._topic, self._folder = spark, settings, topic, folder
        self.checkpoint = "checkpoint-1"
        self.starting_offsets = "earliest"

    def run(self, consume: Callable[[DataFrame, int], None], most: int = 40) -> None:
        options = {
            "kafka.bootstrap.servers": self._settings.bootstrap_servers,
            "kafka.isolation.level": "read_committed",
            "subscribe": self._topic,
            "startingOffsets": self.starting_offsets,
            "maxOffsetsPerTrigger": str(most),
        }
        records = self._spark.readStream.format("kafka").options(**options).load()
        stream = records.writeStream.foreachBatch(consume).option(
            "checkpointLocation", str(self._folder / self.checkpoint)
        )
        stream.trigger(availableNow=True).start().awaitTermination()


def test_a_stream_that_dies_after_a_commit_and_loses_its_checkpoint_has_each_effect_once(
    spark: SparkSession, shop: Settings, topic: str, tmp_path: Path
) -> None:
    produce(shop, topic, numbered(0, 100))
    stream = Stream(spark, shop, topic, tmp_path)
    consume = foreach_batch(shop, CONSUMER, totals(shop))

    def dies_after_the_commit(batch: DataFrame, batch_id: int) -> None:
        consume(batch, batch_id)
        if batch_id == 1:
            raise RuntimeError("killed before Spark knew of the commit")

    with pytest.raises(PySparkException, match="killed before"):
        stream.run(dies_after_the_commit)
    assert 0 < seen(shop)[0] < 100
    stream.run(consume)
    assert seen(shop) == expected(100)
    stream.checkpoint = "checkpoint-2"
    produce(shop, topic, numbered(100, 50))
    stream.run(consume, 70)
    assert seen(shop) == expected(150)


def test_a_stream_that_begins_behind_the_position_says_what_it_passes_over(
    spark: SparkSession, shop: Settings, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    produce(shop, topic, numbered(0, 60))
    stream = Stream(spark, shop, topic, tmp_path)
    stream.run(foreach_batch(shop, CONSUMER, totals(shop)))
    assert "passes over" not in caplog.text
    there = topic_state(shop, topic).end
    produce(shop, topic, numbered(60, 90))
    admin = AdminClient({"bootstrap.servers": shop.bootstrap_servers})
    [deleted] = admin.delete_records([TopicPartition(topic, 0, there[0] + 2)]).values()
    deleted.result(30)
    stream.checkpoint = "checkpoint-2"
    stream.starting_offsets = json.dumps({topic: {"0": there[0] + 2, "1": there[1] + 1, "2": there[2]}})
    stream.run(foreach_batch(shop, CONSUMER, totals(shop)), 10)
    [said] = [each.getMessage() for each in caplog.records if "passes over" in each.getMessage()]
    assert f"the record at offset {there[1]} of partition 1" in said
    position = read_position(shop, CONSUMER, topic)
    assert position is not None
    assert position.lost == 2
    assert seen(shop)[0] == 150 - 3


def test_a_batch_that_fails_before_its_commit_comes_again(
    spark: SparkSession, shop: Settings, topic: str, tmp_path: Path
) -> None:
    produce(shop, topic, numbered(0, 100))
    stream = Stream(spark, shop, topic, tmp_path)

    def refuses(records: DataFrame) -> OutboxWrite:
        wrong = totals(shop)(records)
        return wrong.events(records.selectExpr("string(NULL) AS key", "string(value) AS value"), "forwarded")

    with pytest.raises(PySparkException):
        stream.run(foreach_batch(shop, CONSUMER, refuses))
    assert seen(shop) == (0, 0)
    stream.run(foreach_batch(shop, CONSUMER, totals(shop)))
    assert seen(shop) == expected(100)


def test_a_stream_of_a_topic_that_was_recreated_stops(
    spark: SparkSession, shop: Settings, topic: str, tmp_path: Path
) -> None:
    produce(shop, topic, numbered(0, 20))
    stream = Stream(spark, shop, topic, tmp_path)
    consume = foreach_batch(shop, CONSUMER, totals(shop))
    stream.run(consume)
    query(shop, "UPDATE outbox_consumer_position SET topic_id = 'another'")
    produce(shop, topic, numbered(20, 20))
    with pytest.raises(PySparkException, match=TopicReplaced.__name__):
        stream.run(consume)
    assert seen(shop) == expected(20)
    set_position(shop, CONSUMER, topic, "beginning")
    eventually(lambda: read_position(shop, CONSUMER, topic) is not None, 5)


@pytest.mark.filterwarnings("ignore:.* is currently in beta")  # Dagster's own call.
def test_the_blocks_of_the_page_consume(
    spark: SparkSession, shop: Settings, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in shop.environment().items():
        monkeypatch.setenv(name, value)
    add_packages(spark, PACKAGES)
    produce(shop, topic, numbered(0, 20))
    *declarations, stream = blocks("how-to/consume-in-dagster-and-spark.md", "python")
    for block in declarations:
        exec(compile(block.text, "docs", "exec", dont_inherit=True), {})
    text = stream.text.replace('servers": "…"', f'servers": "{shop.bootstrap_servers}"')
    text = text.replace('"subscribe": "orders"', f'"subscribe": "{topic}"').replace("…", str(tmp_path / "checkpoint"))
    exec(compile(text, "docs", "exec", dont_inherit=True), {"spark": spark, "add": totals(shop)})
    for running in spark.streams.active:
        running.processAllAvailable()
        running.stop()
    assert seen(shop) == expected(20)
