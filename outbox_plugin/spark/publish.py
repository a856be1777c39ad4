"""Moves the rows of the accepted attempts from staging tables to the outbox and the business table.

All functions run in the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.core.backlog import MIN_BACKLOG_IDS
from outbox_plugin.errors import InvalidEvent, OutboxError, UserError
from outbox_plugin.schema.qualify import qualified
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.whole_records import takes_whole_records
from outbox_plugin.spark.staging import PARTITION_BITS, PREFIX, Attempt, StagingTable, identifier, row_column

# If events are published in Spark's order, a row's sequence number follows from its partition and its place within it.
_KNOWN_PLACE = sql.SQL(
    qualified("(%(earlier)s::bigint[])[1 + (outbox_ordinal >> {bits})] + (outbox_ordinal & {mask}) + 1")
).format(bits=PARTITION_BITS, mask=(1 << PARTITION_BITS) - 1)
_COUNTED_PLACE = sql.SQL(qualified("row_number() OVER (ORDER BY {order})"))


class StagingLost(OutboxError):
    """Rows that tasks staged are gone, as after a crash of Postgres. Nothing was written; run the job again."""


class InvalidRow(UserError):
    """Postgres cannot store a business row; nothing was written."""


class RowsDropped(UserError):
    """A table did not take all rows that it was given, because of its own triggers or rules; nothing was written."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The rows that the accepted attempts have copied into a staging table."""

    table: StagingTable
    attempts: list[Attempt]

    @property
    def ids(self) -> list[str]:
        """The ids of the attempts."""
        return [attempt.id for attempt in self.attempts]

    @property
    def rows(self) -> int:
        """The number of rows to publish."""
        return sum(attempt.rows for attempt in self.attempts)

    @property
    def dead_letters(self) -> int:
        """How many of the events become dead letters instead."""
        return sum(attempt.dead_letters for attempt in self.attempts)

    @property
    def earlier(self) -> list[int]:
        """For each partition, in order of their numbers: how many rows all partitions before it have."""
        rows = [0] * (1 + max((attempt.partition for attempt in self.attempts), default=0))
        for attempt in self.attempts:
            rows[attempt.partition] = attempt.rows
        return [0, *accumulate(rows)][:-1]


def accepted(table: StagingTable, attempts: Iterable[Attempt]) -> Staged:
    """The rows of `table` that are to be published: those of the attempts.

    Raises:
        InvalidEvent: an attempt met a row that the outbox or Kafka would refuse.
        InvalidRow: an attempt met a business row that Postgres cannot store.
    """
    staged = Staged(table, list(attempts))
    for attempt in staged.attempts:
        if attempt.refused:
            raise InvalidRow(f"business row, column {attempt.refused.column!r}: {attempt.refused.problem}")
        if attempt.bad:
            raise InvalidEvent(attempt.bad.column, attempt.bad.problem)
    return staged


def publish_events(
    connection: psycopg.Connection[tuple[Any, ...]], staged: Staged, job_id: str, before: int = 0
) -> None:
    """Insert the events, and dead-letter those that the outbox or Kafka would refuse.

    If there are very many events, their keys are summarised, so that the harvester can publish live events of other
    keys without reading all of the batch first.

    Args:
        connection: in a transaction.
        staged: the events.
        job_id: the value of the header `outbox-job`.
        before: how many events of the job earlier commits have published; `outbox-sequence` continues from there.

    Raises:
        StagingLost: not all of them are there any more.
        RowsDropped: the table did not take all of them.
    """
    ordered_by = [
        sql.SQL("{} NULLS FIRST").format(sql.Identifier(name)) for name in staged.table.form.order
    ]  # Spark sorts nulls first.
    order = sql.SQL(", ").join([*ordered_by, sql.Identifier("outbox_ordinal")])
    place = _COUNTED_PLACE.format(order=order) if ordered_by or staged.dead_letters else _KNOWN_PLACE
    values = {"attempts": staged.ids, "job_id": job_id}
    placed = {**values, "before": before, "earlier": staged.earlier}
    setup = "read_by_index" if staged.table.comes_in_order else "sort_in_memory"
    connection.execute(statement("staging", setup, staged.table.outbox))
    takes_whole = staged.table.form.may_be_whole and takes_whole_records(connection, staged.table.outbox)
    publish = "publish_records" if takes_whole else "publish_events"
    _run(connection, staged, publish, staged.table.outbox_name, staged.rows, placed, order=order, place=place)
    if staged.rows >= MIN_BACKLOG_IDS:
        _summarise_keys(connection, staged)
    if staged.dead_letters:
        _run(
            connection,
            staged,
            "dead_letter_events",
            "outbox_dead_letter",
            staged.dead_letters,
            {**values, "table": staged.table.outbox_name},
        )


def _summarise_keys(connection: psycopg.Connection[tuple[Any, ...]], staged: Staged) -> None:
    outbox = staged.table.outbox
    if connection.execute(statement("emit", "may_summarise_keys", outbox)).fetchall():
        connection.execute(statement("emit", "summarise_keys", outbox, written=sql.Literal(staged.rows)))


def digest_events(connection: psycopg.Connection[tuple[Any, ...]], staged: Staged) -> str:
    """A digest of the staged events: their number, and a sum over their topics, keys and values.

    Raises:
        StagingLost: not all of them are there any more.
    """
    digest = "digest_records" if staged.table.form.may_be_whole else "digest_staged"
    query = statement("staging", digest, staged.table.outbox, staging=staged.table.identifier)
    with _lost_if_dropped():
        [(there, total)] = connection.execute(query, {"attempts": staged.ids}).fetchall()
    if there != (expected := staged.rows + staged.dead_letters):
        raise _lost(expected, there)
    return f"{there}:{total}"


def publish_rows(
    connection: psycopg.Connection[tuple[Any, ...]],
    staged: Staged,
    replaced: sql.Composable | None = None,
    on_conflict: sql.Composable | None = None,
) -> None:
    """Insert the business rows.

    Args:
        connection: in a transaction.
        staged: the business rows.
        replaced: rows of the table that meet this condition are deleted first; None deletes none.
        on_conflict: follows ON CONFLICT in the INSERT. It may skip rows, so with it only the staged rows are counted.

    Raises:
        StagingLost: not all of them are there any more.
        RowsDropped: the table did not take all of them.
    """
    table = (staged.table.business or "").split(".")
    if replaced is not None:  # Executed without parameters, because the condition may contain a %.
        connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(sql.Identifier(*table), replaced))
    columns = sql.SQL(", ").join(map(identifier, staged.table.form.business))
    taken = sql.SQL(", ").join(sql.Identifier(row_column(n)) for n in range(len(staged.table.form.business)))
    rows = staged.rows + staged.dead_letters
    conflict = sql.SQL("")
    if on_conflict is not None:
        _check_staged(connection, staged, rows)
        conflict = sql.SQL(" ON CONFLICT " + on_conflict.as_string(connection).replace("%", "%%"))
    _run(
        connection,
        staged,
        "publish_rows",
        ".".join(table),
        rows if on_conflict is None else None,
        {"attempts": staged.ids},
        business=identifier(*table),
        columns=columns,
        taken=taken,
        ending=conflict,
    )


def _run(
    connection: psycopg.Connection[tuple[Any, ...]],
    staged: Staged,
    query: str,
    into: str,
    expected: int | None,
    values: dict[str, Any],
    ending: sql.Composable | None = None,
    **parts: sql.Composable,
) -> None:
    composed = statement("staging", query, staged.table.outbox, staging=staged.table.identifier, **parts)
    if ending is not None:
        composed += sql.Composed([ending])
    with _lost_if_dropped():
        found = connection.execute(composed, values).rowcount
        if expected is None or found == expected:
            return
        there = _count_staged(connection, staged)
    if there == staged.rows + staged.dead_letters:
        raise RowsDropped(
            f"the table {into!r} took {found} of {expected} rows: a trigger or a rule of its own drops rows; "
            "nothing was written"
        )
    raise _lost(expected, found)


def _check_staged(connection: psycopg.Connection[tuple[Any, ...]], staged: Staged, expected: int) -> None:
    with _lost_if_dropped():
        there = _count_staged(connection, staged)
    if there != expected:
        raise _lost(expected, there)


def _count_staged(connection: psycopg.Connection[tuple[Any, ...]], staged: Staged) -> int:
    count = statement("staging", "count_staged", staged.table.outbox, staging=staged.table.identifier)
    [(there,)] = connection.execute(count, {"attempts": staged.ids}).fetchall()
    return int(there)


def _lost(expected: int, there: int) -> StagingLost:
    return StagingLost(f"{expected} rows were staged, and {there} are there; nothing was written: run the job again")


@contextmanager
def _lost_if_dropped() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        if PREFIX not in str(error):
            raise
        raise StagingLost("the staging table was dropped meanwhile; nothing was written: run the job again") from None
