"""Consumes a range in this process: reads its records, and commits the handler's effects and the position together.

The position is locked before the handler runs. It is moved after the handler has returned, and only if the connection
is still in the same transaction. So if the position has moved, the handler has returned. If a handler ends the
transaction, against the rule, the position stays where it was, and the range is consumed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from outbox_plugin.consuming.positions import advance, lock, read_position
from outbox_plugin.consuming.records import read_records
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import Readable, TopicRange, readable, remaining
from outbox_plugin.errors import RAISED_ROLLBACK, HandlerMisuse
from outbox_plugin.inbox.received import Received
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.connection import connect_patiently, errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.consuming")

Handler = Callable[[psycopg.Connection[tuple[Any, ...]], Sequence[Received]], None]
PURPOSE = "outbox consumer"
_TRANSACTION = "SELECT pg_catalog.pg_current_xact_id()::text"


@dataclass(frozen=True, slots=True)
class Consumed:
    """The result of consuming a range.

    Attributes:
        range: what was consumed now: the given range without the part that was consumed before.
        records: how many records had their effects now; None if Spark did not count them.
        lost: how many of its offsets Kafka had deleted before they were read.
        again: all of the range was consumed before, so nothing was written.
    """

    range: TopicRange
    records: int | None
    lost: int = 0
    again: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        """For Dagster: the range, and numbers that it plots."""
        counted = {} if self.records is None else {"records": self.records}
        return {
            "range": {"topic": self.range.topic, "begin": _named(self.range.begin), "end": _named(self.range.end)},
            "offsets": self.range.offsets,
            **counted,
            "lost_offsets": self.lost,
            "consumed_before": self.again,
        }


def _named(offsets: Any) -> dict[str, int]:
    return {str(partition): offset for partition, offset in sorted(offsets.items())}


def unconsumed_range(settings: Settings, wanted: TopicRange) -> tuple[TopicRange, Readable]:
    """Return the part of `wanted` that is not consumed yet, and what Kafka still has of that part.

    Raises:
        RangeRefused, TopicReplaced: it cannot be consumed.
        LogUnavailable, ServerRefused, SchemaMissing: a server is away, or refuses us.
    """
    rest = remaining(wanted, read_position(settings, wanted.consumer, wanted.topic, wanted.backfill))
    if not rest.offsets:
        return rest, Readable(rest)
    return rest, readable(rest, topic_state(settings, wanted.topic))


def confirm_topic(settings: Settings, wanted: TopicRange) -> None:
    """Check that the records were read from the topic that the range names.

    Raises:
        TopicReplaced: the topic was deleted and recreated meanwhile.
    """
    readable(wanted, topic_state(settings, wanted.topic))


def consume_range(settings: Settings, wanted: TopicRange, handler: Handler) -> Consumed:
    """Run a handler with the records of a range. Its database effects happen once, however often this is called.

    What the handler writes is committed together with the position. All records of the range are in memory meanwhile:
    use `consume_range_with_spark` for large ranges.

    Args:
        settings: the outbox, beside which positions are kept, and the Kafka of the topic.
        wanted: the range to consume.
        handler: is called with a psycopg connection, in a transaction that it must not end, and with the records, each
            partition's in their order. It is not called if the range was consumed before or holds no records.

    Raises:
        RangeMoved, RecordsVanished: run it again.
        RangeRefused, TopicReplaced: it cannot be consumed.
        HandlerMisuse: the handler ended the transaction, went on after a failed statement, raised psycopg.Rollback, or
            removed the position; run it again.
        LogUnavailable, ServerRefused, SchemaMissing: a server is away, or refuses us.
        Exception: whatever the handler raises, and psycopg.Error if the commit fails; nothing has had an effect.
    """
    rest, there = unconsumed_range(settings, wanted)
    if not rest.offsets:
        return Consumed(rest, 0, again=True)
    records = read_records(settings, there.range)
    confirm_topic(settings, there.range)
    with closing(_connected(settings)) as connection, connection.transaction():
        with errors_as_refusals(settings):
            table = with_schema(connection, settings.table)  # The handler may change the search_path.
            is_ours = lock(connection, table, rest)
        if not is_ours:
            return Consumed(rest, 0, again=True)
        if records:
            _handle(settings, connection, handler, records)
        advance(connection, table, rest, there.lost)
    return Consumed(rest, len(records), there.lost)


def _connected(settings: Settings) -> psycopg.Connection[tuple[Any, ...]]:
    with errors_as_refusals(settings):
        return connect_patiently(settings, purpose=PURPOSE)


def _handle(
    settings: Settings,
    connection: psycopg.Connection[tuple[Any, ...]],
    handler: Handler,
    records: Sequence[Received],
) -> None:
    """Run the handler; raises HandlerMisuse unless the connection is still in the transaction that was begun."""
    ours = psycopg.Cursor(connection, row_factory=tuple_row)  # The handler may change the connection's row factory.
    [begun] = ours.execute(_TRANSACTION).fetchone() or [None]
    try:
        handler(connection, records)
    except BaseException as error:
        _roll_back_prepared(settings, ours, begun)
        if isinstance(error, psycopg.Rollback):  # psycopg would roll back and raise nothing.
            raise HandlerMisuse(RAISED_ROLLBACK) from error
        raise
    try:
        [present] = ours.execute(_TRANSACTION).fetchone() or [None]
    except psycopg.errors.InFailedSqlTransaction:
        raise HandlerMisuse(
            "the handler went on after a failed statement: let the error through, or use a savepoint"
        ) from None
    if present != begun:
        _roll_back_prepared(settings, ours, begun)
        raise HandlerMisuse(
            "the handler ended the transaction that the range is consumed in: what it has committed stays, and is "
            "written again when the range is run again; let it write, and return"
        )


def _roll_back_prepared(settings: Settings, cursor: psycopg.Cursor[tuple[Any, ...]], begun: str | None) -> None:
    """Roll the transaction back if the handler has prepared it: it would keep the position locked."""
    try:
        cursor.execute("ROLLBACK")  # Of a transaction that the handler has begun since.
        for [roll_back] in cursor.execute(
            statement("inbox", "roll_back_prepared", settings.table), {"id": begun}
        ).fetchall():
            cursor.execute(roll_back)
    except psycopg.Error as error:
        logger.warning("a transaction that a handler has prepared could not be rolled back: %s", one_line(error))
