"""Moves what the accepted attempts staged to where it is seen: all of it in the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.errors import InvalidEvent, OutboxError
from outbox_plugin.schema.statements import statement
from outbox_plugin.spark.staging import PREFIX, Attempt, StagingTable, identifier, row_column


class StagingLost(OutboxError):
    """Rows that tasks had staged are gone, as after a crash of Postgres; nothing was written: run the job again."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What the attempts that Spark accepted have put into a staging table."""

    table: StagingTable
    attempts: list[str]
    rows: int
    set_aside: int


def accepted(table: StagingTable, attempts: Iterable[Attempt]) -> Staged:
    """What is to be published of `table`.

    Raises:
        InvalidEvent: an attempt met a row that the outbox or Kafka would refuse.
    """
    all_of_them = list(attempts)
    for attempt in all_of_them:
        if attempt.bad:
            raise InvalidEvent(attempt.bad.column, attempt.bad.problem)
    rows, set_aside = (sum(getattr(each, name) for each in all_of_them) for name in ("rows", "set_aside"))
    return Staged(table, [attempt.id for attempt in all_of_them], rows, set_aside)


def publish_events(
    connection: psycopg.Connection[tuple[Any, ...]], staged: Staged, job_id: str, before: int = 0
) -> None:
    """Insert the events, and set those aside that would be refused.

    Args:
        connection: in a transaction.
        staged: the events.
        job_id: goes into the header `outbox-job`.
        before: how many events of the job are in the outbox already; `outbox-sequence` goes on from there.

    Raises:
        StagingLost: not all of them are there any more.
    """
    asked = [
        sql.SQL("{} NULLS FIRST").format(sql.Identifier(name)) for name in staged.table.form.order
    ]  # Nulls as in Spark.
    order = sql.SQL(", ").join([*asked, sql.Identifier("outbox_ordinal")])
    values = {"attempts": staged.attempts, "job_id": job_id}
    _run(connection, staged, "publish_events", staged.rows, {**values, "before": before}, order=order)
    if staged.set_aside:
        _run(connection, staged, "set_aside", staged.set_aside, {**values, "table": staged.table.outbox})


def publish_rows(
    connection: psycopg.Connection[tuple[Any, ...]],
    staged: Staged,
    replaced: sql.Composable | None = None,
) -> None:
    """Insert the business rows; those of which `replaced` is true are deleted first.

    Raises:
        StagingLost: not all of them are there any more.
    """
    target = identifier(staged.table.business or "")
    if replaced is not None:
        connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(target, replaced))
    columns = sql.SQL(", ").join(map(sql.Identifier, staged.table.form.business))
    taken = sql.SQL(", ").join(sql.Identifier(row_column(n)) for n in range(len(staged.table.form.business)))
    rows = staged.rows + staged.set_aside
    _run(
        connection,
        staged,
        "publish_rows",
        rows,
        {"attempts": staged.attempts},
        business=target,
        columns=columns,
        taken=taken,
    )


def _run(
    connection: psycopg.Connection[tuple[Any, ...]],
    staged: Staged,
    query: str,
    expected: int,
    values: dict[str, Any],
    **parts: sql.Composable,
) -> None:
    composed = statement("staging", query, staged.table.outbox, staging=staged.table.identifier, **parts)
    with _lost_if_dropped():
        found = connection.execute(composed, values).rowcount
    if found != expected:
        raise StagingLost(f"{expected} rows were staged, and {found} are there; nothing was written: run the job again")


@contextmanager
def _lost_if_dropped() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        if PREFIX not in str(error):
            raise
        raise StagingLost("the staging table was dropped meanwhile; nothing was written: run the job again") from None
