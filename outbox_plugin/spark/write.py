"""The driver's side: stage what the tasks write, then move all of it in one transaction."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame

from outbox_plugin.errors import InvalidEvent, OutboxError
from outbox_plugin.schema.connection import connect, reported_as_refusal
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings
from outbox_plugin.spark.columns import business_columns, outbox_columns
from outbox_plugin.spark.rows import first_bad_row
from outbox_plugin.spark.staging import ATTEMPT_SCHEMA, StageTask

_EVENT_COLUMNS = ("kafka_topic", "kafka_key", "kafka_value", "kafka_header_keys", "kafka_header_values")


class StagingLost(OutboxError):
    """Rows that tasks had staged are gone, as after a crash of Postgres; nothing was written: run the job again."""


@dataclass(frozen=True, slots=True)
class JobCommitted:
    """What a job wrote. `again`: it had been committed before under this id, and nothing was written now."""

    job_id: str
    events: int
    rows: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class _Staged:
    table: sql.Identifier
    attempts: list[str]
    rows: int


class OutboxWrite:
    """A write of business rows and events that appear together or not at all.

    Example:
        OutboxWrite(settings, job_id=run_id).table(flights, "flight").events(departures, topic="departures").commit()
    """

    def __init__(self, settings: Settings, job_id: str | None = None) -> None:
        """`job_id` makes the job repeatable: run again under the same id after a commit, it writes nothing."""
        self._settings = settings
        self._job_id = job_id or uuid.uuid4().hex
        self._business: tuple[DataFrame, str, sql.Composable | None] | None = None
        self._events: tuple[DataFrame, str | None, tuple[str, ...]] | None = None

    def table(
        self,
        rows: DataFrame,
        name: str,
        mode: Literal["append", "overwrite"] = "append",
        where: sql.Composable | None = None,
    ) -> OutboxWrite:
        """Also write `rows` to the business table `name`, whose columns they name.

        With `overwrite` they replace the rows that are there and of which `where` is true: all, unless it is given.
        """
        self._business = rows, name, (where or sql.SQL("true")) if mode == "overwrite" else None
        return self

    def events(self, events: DataFrame, topic: str | None = None, order_by: Sequence[str] = ()) -> OutboxWrite:
        """Emit one event per row of `events`.

        Args:
            events: `key`, `value` (string, struct as JSON, null as tombstone), `headers` (map), `topic` unless given.
            topic: the topic of all of them.
            order_by: columns of `events`; ids, and so what a consumer of a key sees, ascend in their order. Without it,
                events are in the order of the DataFrame's rows.
        """
        self._events = events, topic, tuple(order_by)
        return self

    def commit(self) -> JobCommitted:
        """Stage everything with Spark, then write it in one transaction.

        Raises:
            EventColumnWrong, BusinessColumnWrong: the columns are not of the form that is needed.
            InvalidEvent: an event would be refused by the outbox or by Kafka; nothing has been written.
            StagingLost: Postgres crashed meanwhile.
            ServerRefused, SchemaMissing: Postgres does not let us.
            pyspark.errors.PySparkException: a task failed for good; nothing has been written.
        """
        with reported_as_refusal(self._settings), connect(self._settings, purpose="outbox spark driver") as connection:
            _drop_orphans(connection, self._settings)
            find = statement("staging", "find_job", self._settings.table)
            if connection.execute(find, {"job_id": self._job_id}).fetchall():
                return JobCommitted(self._job_id, 0, 0, again=True)
            with self._stage_all(connection) as (business, events), connection.transaction():
                return self._publish(connection, business, events)

    @contextmanager
    def _stage_all(
        self, connection: psycopg.Connection[tuple[Any, ...]]
    ) -> Iterator[tuple[_Staged | None, _Staged | None]]:
        staged: list[sql.Identifier] = []
        try:
            business = self._stage_rows(connection, staged) if self._business else None
            events = self._stage_events(connection, staged) if self._events else None
            yield business, events
        finally:
            for table in staged:
                if not connection.closed:
                    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table))

    def _stage_rows(
        self, connection: psycopg.Connection[tuple[Any, ...]], staged: list[sql.Identifier]
    ) -> _Staged | None:
        if self._business is None:
            return None
        rows, name, _ = self._business
        source = sql.Identifier(*name.split("."))
        parts = {"business": source, "columns": _listed(rows.columns)}
        return self._stage(connection, "create_rows", business_columns(rows), rows.columns, staged, parts)

    def _stage_events(
        self, connection: psycopg.Connection[tuple[Any, ...]], staged: list[sql.Identifier]
    ) -> _Staged | None:
        if self._events is None:
            return None
        events, topic, order_by = self._events
        ordered = events.orderBy(*order_by) if order_by else events
        return self._stage(connection, "create_events", outbox_columns(ordered, topic), _EVENT_COLUMNS, staged, {})

    def _stage(
        self,
        connection: psycopg.Connection[tuple[Any, ...]],
        create: str,
        rows: DataFrame,
        columns: Sequence[str],
        staged: list[sql.Identifier],
        parts: dict[str, sql.Composable],
    ) -> _Staged:
        *schema, _ = self._settings.table.split(".")
        name = f"outbox_staging_{uuid.uuid4().hex}"
        table = sql.Identifier(*schema, name)
        staged.append(table)
        connection.execute(statement("staging", "own", self._settings.table), {"staging": name})
        connection.execute(statement("staging", create, self._settings.table, staging=table, **parts))
        find_bad_row = first_bad_row if create == "create_events" else None
        task = StageTask(self._settings.dsn.get_secret_value(), (*schema, name), tuple(columns), find_bad_row)
        accepted = rows.mapInArrow(task, ATTEMPT_SCHEMA).collect()
        for attempt in accepted:
            if attempt["problem"] is not None:
                raise InvalidEvent(attempt["bad_column"], attempt["problem"])
        return _Staged(table, [row["attempt"] for row in accepted], sum(row["rows"] for row in accepted))

    def _publish(
        self, connection: psycopg.Connection[tuple[Any, ...]], business: _Staged | None, events: _Staged | None
    ) -> JobCommitted:
        table = self._settings.table
        emitted = events.rows if events else 0
        claim = statement("staging", "claim_job", table)
        if not connection.execute(claim, {"job_id": self._job_id, "events": emitted}).fetchall():
            return JobCommitted(self._job_id, 0, 0, again=True)
        for staged in filter(None, (business, events)):
            self._check_complete(connection, staged)
        if business and self._business:
            rows, name, replaced = self._business
            parts = {"business": sql.Identifier(*name.split(".")), "columns": _listed(rows.columns)}
            if replaced is not None:
                connection.execute(sql.SQL("DELETE FROM {} WHERE {}").format(parts["business"], replaced))
            query = statement("staging", "publish_rows", table, staging=business.table, **parts)
            connection.execute(query, {"attempts": business.attempts})
        if events:
            query = statement("staging", "publish_events", table, staging=events.table)
            connection.execute(query, {"attempts": events.attempts, "job_id": self._job_id})
        return JobCommitted(self._job_id, emitted, business.rows if business else 0)

    def _check_complete(self, connection: psycopg.Connection[tuple[Any, ...]], staged: _Staged) -> None:
        query = statement("staging", "count", self._settings.table, staging=staged.table)
        [(found,)] = connection.execute(query, {"attempts": staged.attempts}).fetchall()
        if found != staged.rows:
            raise StagingLost(f"{staged.rows} rows were staged, and {found} are there; run the job again")


def _listed(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _drop_orphans(connection: psycopg.Connection[tuple[Any, ...]], settings: Settings) -> None:
    """Remove the staging tables of drivers that are gone."""
    with connection.transaction():
        for (name,) in connection.execute(statement("staging", "orphans", settings.table)).fetchall():
            connection.execute(sql.SQL("DROP TABLE IF EXISTS ") + sql.SQL(name))
