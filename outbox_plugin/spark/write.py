"""`OutboxWrite`: a job's business rows and events, written in one transaction of the driver."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f

from outbox_plugin.core.job_id import check_job_id
from outbox_plugin.schema.connection import errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings
from outbox_plugin.spark.business_table import check_business_table
from outbox_plugin.spark.columns import EventForm, RowForm, event_form, row_form
from outbox_plugin.spark.evaluate_once import evaluated_once
from outbox_plugin.spark.job_commit import (
    CommitAttempt,
    CommitSession,
    Connection,
    Outcome,
    StagedWrite,
    commit_once,
    driver_connection,
    drop_or_leave,
    is_committed,
    job_record,
    record_and_publish,
    watch_client,
)
from outbox_plugin.spark.options import OnBadRow, OptionWrong
from outbox_plugin.spark.publish import Staged, accepted
from outbox_plugin.spark.row_problems import RowProblem
from outbox_plugin.spark.staging import Attempt, StageTask, StagingTable, new_staging_table

PURPOSE = "outbox spark driver"
_ATTEMPT = (
    "id string, partition long, rows long, dead_letters long, bad_column string, problem string, business boolean"
)


@dataclass(frozen=True, slots=True)
class JobCommitted:
    """The result of a commit.

    Attributes:
        job_id: the job's.
        events: how many events were emitted.
        rows: how many business rows were written.
        again: True if nothing was written, because the job had been committed before under this id.
        set_aside: how many events the outbox or Kafka would have refused. They became dead letters, in the table
            `outbox_dead_letter`.
    """

    job_id: str
    events: int
    rows: int
    again: bool = False
    set_aside: int = 0


class OutboxWrite:
    """A write of business rows and events that appear together or not at all.

    If rows and events are made of the same DataFrame, it is evaluated once, so that a row and its event agree even if
    the DataFrame calls functions such as `uuid()`. Spark's executors keep the result while the job runs.

    Example:
        OutboxWrite(settings, job_id=run_id).table(flights, "flight").events(departures, topic="departures").commit()
    """

    def __init__(self, settings: Settings, job_id: str | None = None) -> None:
        """`job_id` makes the job repeatable: run again under the same id after a commit, it writes nothing.

        Ids are compared within one outbox. Jobs of several outboxes that emit to one topic need different ids: inboxes
        and checks take two events for the same if they have the same place in a job of the same id.

        Raises:
            InvalidSetting: `job_id` is empty, has more than 1,000 characters, or a NUL.
        """
        self._settings = settings
        self._named_by_user = job_id is not None
        self._job_id = uuid.uuid4().hex if job_id is None else job_id
        check_job_id(self._job_id)
        self._record = job_record(self._job_id)
        self._business: tuple[DataFrame, str, sql.Composable | None, sql.Composable | None] | None = None
        self._condition: Callable[[Connection], bool] | None = None
        self._events: tuple[DataFrame, EventForm, bool] | None = None

    def table(
        self,
        rows: DataFrame,
        name: str,
        mode: Literal["append", "overwrite"] = "append",
        where: sql.Composable | None = None,
        on_conflict: sql.Composable | None = None,
    ) -> OutboxWrite:
        """Also write `rows` to the business table `name`, each column to the table's column of the same name.

        Args:
            rows: each becomes a row of the table.
            name: the table, perhaps with its schema.
            mode: with `overwrite`, the rows replace those that are there.
            where: with `overwrite`, only rows that meet this condition are replaced; by default, all rows.
            on_conflict: with `append`, what follows ON CONFLICT in the INSERT, for example to update existing rows:
                `sql.SQL("(carrier) DO UPDATE SET flights = total.flights + excluded.flights")`.

        Raises:
            OptionWrong: an argument has a value that is not allowed, or the write has a table already.
        """
        if self._business:
            raise OptionWrong(
                "a write has one business table: `table` was called before; write another table in another job"
            )
        if mode not in ("append", "overwrite"):
            raise OptionWrong(f"mode is {mode!r}; expected 'append' or 'overwrite'")
        if where is not None and not isinstance(where, sql.Composable):
            raise OptionWrong(f"where is {where!r}; expected SQL, as with psycopg.sql.SQL('number < 5')")
        if where is not None and mode == "append":
            raise OptionWrong("where selects the rows that are replaced, so it needs mode='overwrite'")
        if on_conflict is not None and not isinstance(on_conflict, sql.Composable):
            raise OptionWrong(f"on_conflict is {on_conflict!r}; expected SQL, as with psycopg.sql.SQL('DO NOTHING')")
        if on_conflict is not None and mode == "overwrite":
            raise OptionWrong("on_conflict is about rows that exist already, so it needs mode='append'")
        replaced = (where or sql.SQL("true")) if mode == "overwrite" else None
        self._business = rows, name, replaced, on_conflict
        return self

    def events(
        self,
        events: DataFrame,
        topic: str | None = None,
        order_by: Sequence[str] = (),
        on_bad_row: OnBadRow = "fail",
    ) -> OutboxWrite:
        """Emit one event per row of `events`.

        Args:
            events: `key` and `value` (strings or bytes; a struct as JSON, null as tombstone), `topic` unless given, and
                perhaps `headers` (a map, or an array of structs) and `partition` (an integer).
            topic: the topic of all of them.
            order_by: the columns of `events` to sort by. Ids ascend in this order, so consumers see the events of a key
                in it. By default, events keep the order of the DataFrame's rows.
            on_bad_row: what happens to an event that the outbox or Kafka would refuse. With `fail` the job fails; with
                `deadLetter` the event goes to the table `outbox_dead_letter` in the same transaction.

        Raises:
            EventColumnWrong: a column is missing or of a wrong type.
            OptionWrong: an argument has a value that is not allowed, or the write has events already.
        """
        if self._events:
            raise OptionWrong("a write has one DataFrame of events: `events` was called before; use union to emit more")
        if on_bad_row not in get_args(OnBadRow):
            raise OptionWrong(f"on_bad_row is {on_bad_row!r}; expected {' or '.join(map(repr, get_args(OnBadRow)))}")
        if isinstance(order_by, str):
            raise OptionWrong(f"order_by is {order_by!r}; expected a list of columns, as [{order_by!r}]")
        form = event_form(events.schema, topic, order_by)
        self._events = events.select(*(f.col(_quoted(name)) for name in form.needed)), form, on_bad_row == "deadLetter"
        return self

    def only_if(self, claim: Callable[[psycopg.Connection[tuple[Any, ...]]], bool]) -> OutboxWrite:
        """Write only if `claim` returns True. It is called before the write, in its transaction, and may write, too.

        A claim that ends the transaction fails the write. If it returns False, nothing is written, not by `claim`
        either, and `again` is True in the result of `commit`. It is called once more if Postgres was lost before the
        commit, and what it wrote was rolled back. If `commit` raises CommitUnknown, run the job again: `claim` must
        tell then whether it has been written.
        `outbox_plugin.consuming.spark` uses it to move a consumer's position in the transaction of the effects.

        Raises:
            OptionWrong: the write already has a condition or a job id; each of them alone prevents a second write.
        """
        if self._named_by_user:
            raise OptionWrong("a write with a condition (`only_if`) takes no job_id: leave it out")
        if self._condition:
            raise OptionWrong("a write has one condition: `only_if` was called before")
        self._condition = claim
        return self

    def commit(self) -> JobCommitted:
        """Stage everything with Spark, then write it in one transaction.

        Raises:
            OptionWrong: there is nothing to write, or a subquery has a part of what rows and events are made of.
            BusinessColumnWrong, BusinessTableMissing: the rows do not fit into the business table.
            InvalidEvent: an event would be refused by the outbox or by Kafka; nothing has been written.
            InvalidRow: a business row would be refused by Postgres; nothing has been written.
            RowsDropped: a table did not take all rows, because of its own triggers or rules; nothing has been written.
            StagingLost: staged rows are gone, as after a crash of Postgres; nothing has been written.
            CommitUnknown: Postgres was lost during the commit, and its outcome is unknown; the message says what to do.
            EvaluationLost: an executor that held data of both rows and events is lost; nothing has been written.
            ServerRefused, SchemaMissing: Postgres refuses us, or the outbox's tables are missing.
            pyspark.errors.PySparkException: a task failed for good; nothing has been written.
        """
        if not (self._business or self._events):
            raise OptionWrong("there is nothing to write: call `table`, `events` or both before `commit`")
        with (
            errors_as_refusals(self._settings),
            CommitSession(partial(driver_connection, self._settings, PURPOSE)) as session,
        ):
            outbox = with_schema(session.connection, self._settings.table)
            if is_committed(session.connection, outbox, self._record):
                return JobCommitted(self._job_id, 0, 0, again=True)
            with self._stage_all(session, outbox) as (business, events):
                publish = partial(self._publish, outbox, business, events)
                outcome = commit_once(session, publish, self._run_again)
        if outcome is not Outcome.PUBLISHED:
            return JobCommitted(self._job_id, 0, 0, again=True)
        return JobCommitted(
            self._job_id,
            events=events.rows if events else 0,
            rows=business.rows if business else 0,
            set_aside=events.dead_letters if events else 0,
        )

    @property
    def _run_again(self) -> str:
        if self._condition:
            return "run the job again: its condition tells whether they were written"
        return f"run the job again with the job id {self._job_id!r}, which writes them if they are not there"

    @contextmanager
    def _stage_all(self, session: CommitSession, outbox: str) -> Iterator[tuple[Staged | None, Staged | None]]:
        connection = session.connection
        tables: list[StagingTable] = []

        def stage(rows: DataFrame, form: EventForm | RowForm, business: str | None, *, dead_letter: bool) -> Staged:
            table = new_staging_table(outbox, form, business, self._settings.table)
            tables.append(table)
            connection.execute(statement("staging", "own", outbox), {"staging": table.name})
            table.create(connection, self._job_id)
            task = StageTask(self._settings.dsn.get_secret_value(), table, dead_letter)
            return accepted(table, map(_as_attempt, rows.mapInArrow(_Reported(task), _ATTEMPT).collect()))

        try:
            business = events = None
            with self._evaluated() as (rows, emitted):
                if self._business and rows is not None:
                    row, name = row_form(rows.schema), self._business[1]
                    check_business_table(connection, outbox, name, row)
                    business = stage(rows, row, name, dead_letter=False)
                if self._events and emitted is not None:
                    _, form, dead_letter = self._events
                    events = stage(emitted, form, None, dead_letter=dead_letter)
            yield business, events
        finally:
            drop_or_leave(session.connection, *tables)

    @contextmanager
    def _evaluated(self) -> Iterator[tuple[DataFrame | None, DataFrame | None]]:
        """The business rows and the events, each evaluated once."""
        rows = self._business[0] if self._business else None
        events = self._events[0] if self._events else None
        if rows is None or events is None:
            yield rows, events
            return
        with evaluated_once(rows, events) as both:
            yield both

    def _publish(self, outbox: str, business: Staged | None, events: Staged | None, attempt: CommitAttempt) -> Outcome:
        watch_client(attempt.connection, outbox)
        replaced, on_conflict = self._business[2:] if self._business else (None, None)
        write = StagedWrite(business, events, replaced, on_conflict)
        return record_and_publish(attempt, outbox, self._record, write, self._condition)


@dataclass(frozen=True)
class _Reported:
    """A task in the form that `mapInArrow` expects: its result is one row, the attempt."""

    task: StageTask

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        attempt = self.task(batches)
        wrong = attempt.refused or attempt.bad or (None, None)
        business = attempt.refused is not None
        values = [attempt.id, attempt.partition, attempt.rows, attempt.dead_letters, *wrong, business]
        kinds = [pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.string(), pa.bool_()]
        names = ["id", "partition", "rows", "dead_letters", "bad_column", "problem", "business"]
        yield pa.RecordBatch.from_arrays(
            [pa.array([value], kind) for value, kind in zip(values, kinds, strict=True)], names
        )


def _as_attempt(row: Row) -> Attempt:
    wrong = None if row["problem"] is None else RowProblem(row["bad_column"], row["problem"])
    bad, refused = (None, wrong) if row["business"] else (wrong, None)
    return Attempt(row["id"], row["partition"], row["rows"], row["dead_letters"], bad, refused)


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
