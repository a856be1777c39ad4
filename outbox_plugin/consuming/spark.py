"""Consumes ranges of a topic and batches of a stream with Spark: rows, events and position in one transaction.

`OutboxWrite` writes the rows: tasks stage them, and the driver publishes those that Spark accepted, once. The same
transaction moves the consumer's position. If somebody has moved the position meanwhile, it writes nothing. So tasks
that are retried or run speculatively, a batch that runs again after a restart, and a plan that is evaluated twice have
no second effect.

A stream's checkpoint decides where it goes on. The position in Postgres decides which records have had their effects.
If the checkpoint is older than the position, or was lost, records before the position are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import psycopg
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from outbox_plugin.consuming.consume import Consumed, confirm_topic, unconsumed_range
from outbox_plugin.consuming.positions import RangeMoved, lock_and_advance, read_position
from outbox_plugin.consuming.records import first_record
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import TopicRange, TopicState, remaining
from outbox_plugin.errors import RangeRefused
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import connect_patiently, errors_as_refusals
from outbox_plugin.settings import Settings
from outbox_plugin.spark.kafka_source import read_offsets
from outbox_plugin.spark.write import OutboxWrite

logger = logger_of("outbox_plugin.consuming")

Write = Callable[[DataFrame], OutboxWrite]
_Condition = Callable[[psycopg.Connection[tuple[object, ...]]], bool]


def consume_range_with_spark(spark: SparkSession, settings: Settings, wanted: TopicRange, write: Write) -> Consumed:
    """Write the results of a range's records with Spark. They are written once, however often this is called.

    Args:
        spark: any session; Spark's Kafka source is added to it if it is not there.
        settings: the outbox, beside which positions are kept, and the Kafka of the topic.
        wanted: the range to consume.
        write: is called with the records, with the columns of Spark's Kafka source, and returns a write that it has
            not committed. It is not called if the range was consumed before.

    Raises:
        RangeMoved: run it again.
        RangeRefused, TopicReplaced: it cannot be consumed.
        InvalidSetting: Spark's Kafka source cannot be downloaded.
        LogUnavailable, ServerRefused, SchemaMissing: a server is away, or refuses us.
        CommitUnknown: Postgres was lost during the commit. Call this again: the position decides.
        OutboxError, pyspark.errors.PySparkException: as `OutboxWrite.commit` does; nothing was written.
    """
    rest, there = unconsumed_range(settings, wanted)
    if not rest.offsets:
        return Consumed(rest, 0, again=True)
    ranges = [(rest, there.lost)]
    if not there.range.offsets:  # Kafka has deleted all of it.
        done = _advance_alone(settings, ranges)
        return Consumed(rest, 0, there.lost, again=not done)
    records = read_offsets(spark, settings, wanted.topic, there.range.begin, there.range.end)
    written = write(records).only_if(
        position_condition(settings, ranges, partial(confirm_topic, settings, there.range))
    )
    done = not written.commit().again
    return Consumed(rest, None, there.lost, again=not done)


def foreach_batch(settings: Settings, consumer: str, write: Write) -> Callable[[DataFrame, int], None]:
    """Make a function for `writeStream.foreachBatch` that consumes topics with each record's effect once.

    Args:
        settings: as for `consume_range_with_spark`.
        consumer: the name of the position, which no other stream may use; the same after each restart.
        write: as for `consume_range_with_spark`; it gets the records of a batch that have had no effect yet. Its
            columns `topic`, `partition` and `offset` must be the Kafka source's own.

    The source must read `read_committed`, because a harvester that was killed leaves records of an aborted transaction
    in the topic. It must begin at the earliest offsets, or a stream that has lost its checkpoint would skip records.
    The stream must be stateless: a record that an operator of the plan keeps for a later batch counts as consumed. If
    the stream begins behind the position, offsets that Kafka has deleted in between count as lost, and a warning names
    a record that is skipped.

    A batch that fails with CommitUnknown has been written, or has not. Start the stream again: the position tells.

    Example:
        source = spark.readStream.format("kafka").option("subscribe", "orders")
        source = source.option("kafka.isolation.level", "read_committed").option("startingOffsets", "earliest")
        source.load().writeStream.foreachBatch(foreach_batch(settings, "totals", write)).start()
    """
    left_at: dict[tuple[str, int], int] = {}  # By topic id and partition: the position to which this stream has moved.

    def consume(batch: DataFrame, batch_id: int) -> None:  # noqa: ARG001 - Spark's signature.
        kept = batch.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            ranges = []
            for spanned, state in _ranges(settings, consumer, kept):
                if (rest := _rest(settings, spanned)).offsets:
                    ranges.append((rest, _lost_before(settings, rest, spanned, state, left_at)))
            if ranges:
                write(_within(kept, [rest for rest, _ in ranges])).only_if(
                    position_condition(settings, ranges)
                ).commit()
                left_at.update(((rest.topic_id, each), end) for rest, _ in ranges for each, end in rest.end.items())
        finally:
            kept.unpersist()

    return consume


def _ranges(settings: Settings, consumer: str, batch: DataFrame) -> list[tuple[TopicRange, TopicState]]:
    """The range that a batch spans in each topic, and where the topic begins and ends."""
    if missing := {"topic", "partition", "offset"} - set(batch.columns):
        raise RangeRefused(f"{consumer}: the batch lacks the columns {', '.join(sorted(missing))} of the Kafka source")
    spans = batch.groupBy("topic", "partition").agg(f.min("offset").alias("begin"), f.max("offset").alias("last"))
    found: dict[str, tuple[dict[int, int], dict[int, int]]] = {}
    for row in spans.collect():
        begin, end = found.setdefault(row["topic"], ({}, {}))
        begin[row["partition"]], end[row["partition"]] = row["begin"], row["last"] + 1
    states = {topic: topic_state(settings, topic) for topic in sorted(found)}
    return [(TopicRange(consumer, topic, state.topic_id, *found[topic]), state) for topic, state in states.items()]


def _rest(settings: Settings, spanned: TopicRange) -> TopicRange:
    """The part of a batch that has had no effect yet. It begins at the position, even if its first record is later."""
    position = read_position(settings, spanned.consumer, spanned.topic)
    known = position.next_offsets if position else {}
    begin = {each: min(first, known.get(each, first)) for each, first in spanned.begin.items()}
    whole = TopicRange(spanned.consumer, spanned.topic, spanned.topic_id, begin, spanned.end)
    return remaining(whole, position)


def _lost_before(
    settings: Settings,
    rest: TopicRange,
    spanned: TopicRange,
    state: TopicState,
    left_at: Mapping[tuple[str, int], int],
) -> int:
    """How many offsets Kafka has deleted between the position and the first records of a batch.

    Warns if there is a record in between and the stream has not moved the position there itself: the stream began too
    late, or one of its filters leaves the record out.
    """
    lost, begin, end = 0, {}, {}
    for partition, position in rest.begin.items():
        first = max(position, spanned.begin[partition])
        there = min(max(position, state.first.get(partition, 0)), first)
        lost += there - position
        if left_at.get((rest.topic_id, partition)) != position:
            begin[partition], end[partition] = there, first
    if skipped := first_record(settings, replace(rest, begin=begin, end=end)):
        logger.warning(
            "%s: the stream passes over the record at offset %d of partition %d, which has had no effect: unless it is "
            "to leave that out, begin it at the earliest offsets",
            rest.name,
            skipped.offset,
            skipped.partition,
        )
    return lost


def _within(batch: DataFrame, ranges: list[TopicRange]) -> DataFrame:
    """The records of `batch` that are in `ranges`."""
    wanted = f.lit(False)
    for each in ranges:
        for partition, first in each.begin.items():
            wanted |= (f.col("topic") == each.topic) & (f.col("partition") == partition) & (f.col("offset") >= first)
    return batch.where(wanted)


def position_condition(
    settings: Settings, ranges: list[tuple[TopicRange, int]], confirm: Callable[[], None] = lambda: None
) -> _Condition:
    """A condition for `OutboxWrite.only_if`. It moves all positions, or returns False if all was consumed before.

    It raises RangeMoved if some of the ranges were consumed before and others were not.

    Args:
        settings: name the outbox.
        ranges: the ranges to consume, each with the number of its offsets that Kafka had deleted.
        confirm: called first; it may raise an exception to prevent the write.
    """

    def run(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
        confirm()
        moved = [lock_and_advance(connection, settings.table, wanted, lost) for wanted, lost in ranges]
        if any(moved) and not all(moved):  # No position may move without its effects.
            names = ", ".join(wanted.name for wanted, _ in ranges)
            raise RangeMoved(f"{names}: a part of the batch was consumed meanwhile: run it again")
        return all(moved)

    return run


def _advance_alone(settings: Settings, ranges: list[tuple[TopicRange, int]]) -> bool:
    with (
        errors_as_refusals(settings),
        connect_patiently(settings, purpose="outbox consumer") as connection,
        connection.transaction(),
    ):
        return position_condition(settings, ranges)(connection)
