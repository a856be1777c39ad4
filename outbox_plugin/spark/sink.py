"""`df.write.format("outbox")` and `df.writeStream.format("outbox")`: the outbox as a Python data source for Spark.

Spark creates a writer in one process, runs its tasks in others, and commits in one more. So no database session lasts
for a whole job: the tasks create the staging table, and a lease in the database keeps the table for the job.
`job_commit` describes the steps of a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from outbox_plugin.errors import UserError
from outbox_plugin.schema.connection import errors_as_refusals
from outbox_plugin.schema.orphaned_staging_tables import drop_orphans
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings
from outbox_plugin.spark.business_table import check_business_table
from outbox_plugin.spark.columns import EVENT_FIELDS, EventForm, event_form, row_form
from outbox_plugin.spark.job_commit import (
    CommitAttempt,
    CommitRecord,
    CommitSession,
    Connection,
    Outcome,
    StagedWrite,
    batch_record,
    commit_once,
    driver_connection,
    drop_or_leave,
    is_committed,
    job_record,
    record_and_publish,
    watch_client,
)
from outbox_plugin.spark.options import OptionWrong, SinkOptions, sink_options
from outbox_plugin.spark.publish import Staged, accepted, digest_events
from outbox_plugin.spark.staging import Attempt, StageTask, StagingTable, new_staging_table

COMMIT_PURPOSE = "outbox spark commit"


class CheckpointTooOld(UserError):
    """A stream's checkpoint was set back: it is older than the batches that the stream has published."""


def register(spark: SparkSession) -> None:
    """Register the format "outbox" with `spark`, for `df.write` and `df.writeStream`.

    This package must be installed in the Python that Spark's workers run (PYSPARK_PYTHON).
    """
    spark.dataSource.register(OutboxDataSource)


@dataclass
class _Message(WriterCommitMessage):
    """What a task sends to the process that commits."""

    attempt: Attempt | None = None  # None: nothing was staged, because the job had been committed before.
    table: StagingTable | None = None
    query_id: str = ""


@dataclass(frozen=True)
class _Sink:
    """The staging and publishing that batches and streams share."""

    settings: Settings = field(repr=False)
    options: SinkOptions = field(repr=False)
    form: EventForm
    outbox: str  # With its schema.

    def new_table(self) -> StagingTable:
        return new_staging_table(self.outbox, self.form, self.options.business_table, self.settings.table)

    def stage(self, batches: Iterator[pa.RecordBatch], table: StagingTable, job_id: str) -> Attempt:
        return StageTask(self.settings.dsn.get_secret_value(), table, self.options.dead_letter, job_id)(batches)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with _connection(self.settings) as connection:
            yield connection

    def publish(
        self,
        staged: Staged,
        job_id: str,
        run_again: str,
        record_of: Callable[[Connection], CommitRecord],
        check_repeat: Callable[[Connection, CommitRecord], None] | None = None,
    ) -> None:
        """Publish the staged rows unless their commit was recorded before; then remove the staging table.

        Args:
            staged: the events, each with its business row where there is a business table.
            job_id: of the job or the stream.
            run_again: what the user is told to do if the outcome cannot be found out.
            record_of: makes the commit's record, in the transaction of the commit.
            check_repeat: called if the commit was recorded before.
        """
        record: CommitRecord | None = None

        def publish(attempt: CommitAttempt) -> Outcome:
            nonlocal record
            connection = attempt.connection
            watch_client(connection, self.outbox)
            if record is None:  # A second attempt may find that a crash has emptied the staging table.
                record = record_of(connection)
            write = StagedWrite(staged if self.options.business_table else None, staged)
            outcome = record_and_publish(attempt, self.outbox, record, write)
            if outcome is Outcome.RECORDED_BEFORE and check_repeat:
                check_repeat(connection, record)
            return outcome

        with errors_as_refusals(self.settings), CommitSession(partial(_connected, self.settings)) as session:
            commit_once(session, publish, run_again)
            drop_or_leave(session.connection, staged.table)
            with suppress(psycopg.Error):  # The rows are committed, so the job must not fail any more.
                drop_orphans(session.connection, self.outbox, job_id)

    def drop(self, table: StagingTable) -> None:
        with self.connection() as connection:
            drop_or_leave(connection, table)


class OutboxWriter(DataSourceArrowWriter):
    """One `df.write.format("outbox").save()`."""

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._table = sink.new_table()
        self._record = job_record(sink.options.job_id)
        with sink.connection() as connection:
            self._again = is_committed(connection, sink.outbox, self._record)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """A task: stage its partition."""
        if self._again:
            return _Message()
        return _Message(self._sink.stage(iterator, self._table, self._sink.options.job_id))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what the accepted attempts staged, in one transaction.

        Raises:
            InvalidEvent: a row would be refused by the outbox or by Kafka; nothing is written.
            InvalidRow: a business row would be refused by Postgres; nothing is written.
            StagingLost: Postgres crashed meanwhile, or a later run of the same job is under way.
            CommitUnknown: Postgres was lost during the commit, and its outcome could not be found out.
        """
        if not self._again:
            staged = accepted(self._table, [message.attempt for message in _own(messages) if message.attempt])
            job_id = self._record.job_id
            run_again = f"run the job again with the jobId {job_id!r}, which writes them if they are not there"
            self._sink.publish(staged, job_id, run_again, lambda _: self._record)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002
        """Remove the staging table."""
        self._sink.drop(self._table)


class OutboxStreamWriter(DataSourceStreamArrowWriter):
    """A batch of `df.writeStream.format("outbox")`; Spark makes one before its tasks, and another to commit it."""

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._table = sink.new_table()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """A task: stage its partition."""
        context = TaskContext.get()
        query_id = context.getLocalProperty("sql.streaming.queryId") if context else None
        if query_id is None:
            raise OptionWrong("Spark gives this task no query id, so its batch cannot be recorded")
        return _Message(self._sink.stage(iterator, self._table, query_id), self._table, query_id)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish the batch in one transaction that records it, unless it was published before.

        Raises:
            InvalidEvent: a row would be refused by the outbox or by Kafka; nothing is written.
            StagingLost: Postgres crashed meanwhile.
            CommitUnknown: Postgres was lost during the commit, and its outcome could not be found out.
            CheckpointTooOld: a later batch of the query, or this one with other events, has been published; nothing is
                written.
        """
        own = _own(messages)
        for table, query_id in {(message.table, message.query_id) for message in own if message.table}:
            staged = accepted(table, [message.attempt for message in own if message.attempt])
            record_of = partial(self._record, staged, query_id, batchId)
            run_again = "start the stream again, which writes them if they are not there"
            self._sink.publish(staged, query_id, run_again, record_of, self._check_repeat)

    @staticmethod
    def _record(staged: Staged, query_id: str, batch_id: int, connection: Connection) -> CommitRecord:
        return batch_record(query_id, batch_id, digest_events(connection, staged))

    def _check_repeat(self, connection: Connection, record: CommitRecord) -> None:
        """Check that a repeated batch is the last one that was published, with the same events.

        Spark repeats only the last batch. If a checkpoint was set back by one batch, Spark may put other rows under the
        last batch's number.
        """
        last_batch = statement("staging", "last_batch", self._sink.outbox)
        [(last, is_same)] = connection.execute(last_batch, record.parameters).fetchall()
        batch_id, query_id = record.parameters["batch_id"], record.parameters["job_id"]
        if last > batch_id:
            raise CheckpointTooOld(
                f"the checkpoint of the stream {query_id} was set back: expected batch {last}, which it has emitted "
                f"last, or a later one (given: batch {batch_id}); nothing was written. {_how_to_restore(last)}"
            )
        if not is_same:
            schema, _, _ = self._sink.outbox.rpartition(".")
            emitted = sql.SQL("UPDATE {} SET digest = NULL WHERE query_id = {}").format(
                sql.Identifier(schema, "outbox_stream"), query_id
            )
            raise CheckpointTooOld(
                f"batch {last} of the stream {query_id} was emitted before: expected the same events again "
                f"(given: others); nothing was written. If the checkpoint was set back: {_how_to_restore(last)} If the "
                "query makes other keys or values each time it runs, as with rand(): have the batch count as emitted, "
                f"by {emitted.as_string(connection)}, and start the stream again"
            )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Remove the staging table."""
        for table in {message.table for message in _own(messages) if message.table}:
            self._sink.drop(table)


def _how_to_restore(last: int) -> str:
    """What to do about a checkpoint that was set back behind batch `last`."""
    return (
        f"Restore the checkpoint as it was at batch {last} or later. Or begin with a new checkpoint: the stream then "
        "emits again all that its source gives from the beginning, so have the source begin behind what was emitted."
    )


def _own(messages: list[WriterCommitMessage | None]) -> list[_Message]:
    return [message for message in messages if isinstance(message, _Message)]


class OutboxDataSource(DataSource):
    """The format "outbox", which can be written to, but not read."""

    @classmethod
    def name(cls) -> str:
        """The name that `format(…)` takes."""
        return "outbox"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For a batch.

        Raises:
            OptionWrong, EventColumnWrong, BusinessColumnWrong: an option or a column is wrong.
            BusinessTableMissing: there is no business table of that name.
            InvalidSetting, ServerRefused, SchemaMissing: the database is not named, or refuses us.
        """
        return OutboxWriter(self._sink(schema, overwrite, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """For a stream.

        Raises:
            OptionWrong, EventColumnWrong, BusinessColumnWrong: an option or a column is wrong.
            BusinessTableMissing: there is no business table of that name.
            InvalidSetting, ServerRefused, SchemaMissing: the database is not named, or refuses us.
        """
        return OutboxStreamWriter(self._sink(schema, overwrite, streaming=True))

    def _sink(self, schema: StructType, overwrite: bool, *, streaming: bool) -> _Sink:
        options = sink_options(self.options, streaming=streaming)
        if overwrite:
            raise OptionWrong('an outbox is only appended to: write with mode("append"), or outputMode("append")')
        settings = Settings(bootstrap_servers="none", **options.settings)  # Spark's part needs no Kafka.
        rows = row_form(schema, leave_out=EVENT_FIELDS) if options.business_table else None
        form = event_form(schema, options.topic, options.order_by, rows)
        with _connection(settings) as connection:
            outbox = with_schema(connection, settings.table)
            if options.business_table and rows:
                check_business_table(connection, outbox, options.business_table, rows)
        return _Sink(settings, options, form, outbox)


@contextmanager
def _connection(settings: Settings) -> Iterator[Connection]:
    with errors_as_refusals(settings), _connected(settings) as connection:
        yield connection


def _connected(settings: Settings) -> Connection:
    return driver_connection(settings, COMMIT_PURPOSE)
