"""Verifies topics of any size with Spark, in one read.

It uses the same headers as `verifier.Verifier`, and comes to the same verdict. The sequence numbers of a job's events
have no gaps, and the database knows how many events there are. So a missing event is found by its sequence number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as f

from outbox_plugin.core.headers import (
    EVENT_TYPE_HEADER,
    IDEMPOTENCY_HEADER,
    JOB_HEADER,
    REPLAY_HEADER,
    SEQUENCE_HEADER,
)
from outbox_plugin.settings import Settings
from outbox_plugin.spark.kafka_source import read_topics, spark_errors_as_refusals
from outbox_plugin.verification.emitted_counts import emitted_counts
from outbox_plugin.verification.topic_ends import wait_for_commits
from outbox_plugin.verification.verdict import MAX_EXAMPLES, TopicVerdict

_LOG_ORDER = ("topic", "partition", "offset")


def verify(
    spark: SparkSession,
    settings: Settings,
    topics: Sequence[str],
    *,
    job: str | None = None,
    expected: DataFrame | None = None,
) -> TopicVerdict:
    """Read `topics` to their present end, as a `read_committed` consumer sees them, and verify them.

    Args:
        spark: any session. Spark's Kafka source is added to it if necessary.
        settings: name Kafka, and the database that knows how many events a job emitted.
        topics: all topics that the jobs emitted to. Events in other topics count as missing.
        job: verify only the records of this job, or of this streaming query.
        expected: the idempotency keys that the topics must contain, in the column `idempotency_key`.

    Raises:
        InvalidSetting: Spark's Kafka source cannot be downloaded.
        ServerRefused: Kafka or Postgres does not answer, or there is no such topic.
    """
    wait_for_commits(settings, topics)
    with spark_errors_as_refusals(settings, topics):
        seen = _judgeable(read_topics(spark, settings, topics))
        if job is not None:
            seen = seen.where(f.col("job") == job)
        with _kept(seen) as all_seen, _kept(_again(_first_emitted(all_seen))) as again:
            verdict = _counted(all_seen)
            _find_duplicates(again, verdict)
            emitted = _first_emitted(all_seen)
            _find_violations(_once(emitted, again) if verdict.duplicates else emitted, verdict)
            _find_gaps(spark, settings, all_seen, job, verdict)
            if expected is not None:
                _find_absent(all_seen, expected, verdict)
    return verdict


@contextmanager
def _kept(rows: DataFrame) -> Iterator[DataFrame]:
    """Cache `rows` on the executors, so that they are computed once."""
    kept = rows.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield kept
    finally:
        kept.unpersist()


def _judgeable(records: DataFrame) -> DataFrame:
    """The columns that the verification needs: a record's location, its key, and values of its headers."""

    def header(name: str) -> Column:
        pairs = f.filter("headers", lambda pair: pair["key"] == name)
        return f.try_element_at(pairs, f.lit(-1))["value"].cast("string")

    def first(name: str) -> Column:
        pairs = f.filter("headers", lambda pair: (pair["key"] == name) & (f.length(pair["value"]) > 0))
        return f.try_element_at(pairs, f.lit(1))["value"].cast("string")

    return records.select(
        *_LOG_ORDER,
        f.coalesce("key", f.lit(b"")).alias("key"),
        first(IDEMPOTENCY_HEADER).alias("event"),
        f.coalesce(first(EVENT_TYPE_HEADER), f.lit("")).alias("type"),
        f.coalesce(header(JOB_HEADER), f.lit("")).alias("job"),
        header(SEQUENCE_HEADER).try_cast("long").alias("place"),
        f.coalesce(f.exists("headers", lambda pair: pair["key"] == REPLAY_HEADER), f.lit(False)).alias("replayed"),
    )


def _first_emitted(seen: DataFrame) -> DataFrame:
    """The records without those that `outbox replay` has emitted again."""
    return seen.where(~f.col("replayed"))


def _identity() -> Column:
    """The identity of a record's event, by the rules of `core.event_identity`."""
    named = f.concat_ws("\0", "topic", "type", f.lit("named"), "event")
    placed = f.concat_ws("\0", "topic", "type", f.lit("placed"), "job", f.col("place").cast("string"))
    elsewhere = f.concat_ws("\0", f.lit("elsewhere"), *_LOG_ORDER)
    return f.when(f.col("event").isNotNull(), named).when(_is_placed(), placed).otherwise(elsewhere)


def _is_placed() -> Column:
    return f.col("place").isNotNull() & (f.col("job") != "")


def _again(seen: DataFrame) -> DataFrame:
    """The duplicates: all records of an event except the first. Only events with several records are sorted."""
    identified = seen.withColumn("identity", _identity())
    repeated = identified.groupBy("identity").agg(f.count("*").alias("times")).where("times > 1").select("identity")
    times = f.row_number().over(Window.partitionBy("identity").orderBy(*_LOG_ORDER))
    return identified.join(repeated, "identity", "left_semi").withColumn("time", times).where("time > 1")


def _once(seen: DataFrame, again: DataFrame) -> DataFrame:
    return seen.join(again.select(*_LOG_ORDER), list(_LOG_ORDER), "left_anti")


def _counted(seen: DataFrame) -> TopicVerdict:
    replayed, unnamed, unplaced = f.col("replayed"), f.col("event").isNull(), f.col("place").isNull()
    row = seen.agg(
        f.count("*"),
        f.count_if(replayed),
        f.count_if(~replayed & unnamed & ~_is_placed()),
        f.count_if(~replayed & unplaced),
    ).first()
    records, again, without_name, without_place = row or (0, 0, 0, 0)
    return TopicVerdict(records, replayed=again, unnamed=without_name, unplaced=without_place)


def _find_duplicates(again: DataFrame, verdict: TopicVerdict) -> None:
    verdict.duplicates = again.count()
    if verdict.duplicates:
        verdict.example_duplicates = [
            f"{row.event or f'{row.job} {row.place}'} at {_where(row)}" for row in again.limit(MAX_EXAMPLES).collect()
        ]


def _find_violations(once: DataFrame, verdict: TopicVerdict) -> None:
    """Compare each record with the one before it of its partition, key and job. `once` has no duplicates."""
    before = Window.partitionBy("topic", "partition", "key", "job").orderBy("offset")
    placed = once.where("place IS NOT NULL").select("*", f.lag("place").over(before).alias("before"))
    with _kept(placed.where("before > place")) as violations:
        verdict.order_violations = violations.count()
        if verdict.order_violations:
            verdict.example_violations = [
                f"key {bytes(row.key).decode(errors='replace')} at {_where(row)}"
                for row in violations.limit(MAX_EXAMPLES).collect()
            ]


def _find_gaps(
    spark: SparkSession, settings: Settings, seen: DataFrame, job: str | None, verdict: TopicVerdict
) -> None:
    places = seen.where("place > 0 AND job <> ''").select("job", "place")
    each = places.distinct().groupBy("job").agg(f.max("place").alias("last"), f.count("*").alias("places"))
    found = {row.job: (row.last, row.places) for row in each.collect()}
    known = emitted_counts(settings, sorted({*found, *([job] if job else [])}))
    for name in sorted({*found, *known}):
        last, present = found.get(name, (0, 0))
        whole = max(last, known.get(name, 0))
        if whole == present:
            continue
        verdict.missing += whole - present
        if room := MAX_EXAMPLES - len(verdict.example_missing):
            gaps = spark.range(1, whole + 1).withColumnRenamed("id", "place")
            lost = gaps.join(places.where(f.col("job") == name), "place", "left_anti").orderBy("place").limit(room)
            verdict.example_missing += [f"{name} {row.place}" for row in lost.collect()]


def _find_absent(seen: DataFrame, expected: DataFrame, verdict: TopicVerdict) -> None:
    keys = expected.select(f.col("idempotency_key").cast("string").alias("event")).distinct()
    with _kept(keys.join(seen.select("event").distinct(), "event", "left_anti")) as absent:
        if lost := absent.count():
            verdict.missing += lost
            room = MAX_EXAMPLES - len(verdict.example_missing)
            verdict.example_missing += [row.event for row in absent.limit(room).collect()]


def _where(row: Row) -> str:
    return f"{row.topic}/{row.partition} offset {row.offset}"
