"""A Spark task copies its partition into a staging table, under an attempt id of its own.

This runs in Spark's Python workers, which import the module themselves.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext

from outbox_plugin.schema.orphaned_staging_tables import drop_unless_used
from outbox_plugin.schema.qualify import qualified
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.whole_records import takes_whole_records
from outbox_plugin.spark.columns import BusinessColumnWrong, EventForm, RowForm
from outbox_plugin.spark.copy_format import BINARY_END, BINARY_START, binary_rows, csv_rows
from outbox_plugin.spark.row_problems import RowProblem, TableLimits

C = TypeVar("C", bound=psycopg.Connection[Any])

SCHEMA = "outbox_staging"
PREFIX = "outbox_staging_"
RESTART_SECONDS = 30.0
# Set whatever the role's default is: at a stricter level, tasks that renew the same lease fail to serialize.
ISOLATION = psycopg.IsolationLevel.READ_COMMITTED
MAX_COLUMNS = 1_600  # Of a table in Postgres.
# Where COPY has stopped, in the server's language: the staging table, the column's name (`row_column`), and the value.
_BUSINESS_COLUMN = re.compile(rf"^[^:\n]*{PREFIX}[0-9a-f]+[^:\n]*\brow_(\d+)\b(.*)", re.MULTILINE)
PARTITION_BITS = 40  # An ordinal is the partition's number, followed by 40 bits for the row's number within it.


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one attempt of a partition's task staged, or why its job must fail.

    Attributes:
        id: unique to the attempt; each row that it stages has it.
        partition: the partition's number.
        rows: how many good rows it has staged.
        dead_letters: how many rows it has staged that become dead letters.
        bad: the first bad event, if a bad event fails the job.
        refused: the first business row that Postgres cannot store.
    """

    id: str
    partition: int
    rows: int
    dead_letters: int = 0
    bad: RowProblem | None = None
    refused: RowProblem | None = None


@dataclass(frozen=True)
class StagingTable:
    """A table that the tasks of one job fill.

    Attributes:
        outbox: the outbox's name with its schema, so that every session finds the same table.
        name: the staging table's name, without a schema.
        form: the columns of its rows.
        business: the business table that receives the business rows.
        known_as: the outbox's name as the user gave it, if it differs from `outbox`.
    """

    outbox: str
    name: str
    form: EventForm | RowForm
    business: str | None = None
    known_as: str | None = None

    @property
    def outbox_name(self) -> str:
        """The outbox's name as the user gave it."""
        return self.known_as or self.outbox

    @property
    def identifier(self) -> sql.Identifier:
        """Its name, with the schema that `outbox migrate` creates for such tables."""
        return sql.Identifier(SCHEMA, self.name)

    @property
    def columns(self) -> dict[str, sql.Composable]:
        """Its columns, each with an SQL expression that gives it its type."""
        own = {"outbox_attempt": f"'{uuid.UUID(int=0)}'::uuid", "outbox_ordinal": "0::bigint", **self.form.typed}
        rows = {row_column(n): identifier("business", name) for n, name in enumerate(self.form.business)}
        return {**{name: sql.SQL(qualified(example)) for name, example in own.items()}, **rows}

    @property
    def comes_in_order(self) -> bool:
        """Whether its events are published in the order in which Spark passed them to the tasks."""
        return isinstance(self.form, EventForm) and not self.form.order

    def create(self, connection: psycopg.Connection[tuple[Any, ...]], job_id: str) -> None:
        """Create the table, and register it for the job, so that any job can remove it once no session owns it."""
        columns = [sql.SQL("{} AS {}").format(kind, sql.Identifier(name)) for name, kind in self.columns.items()]
        source = identifier(*self.business.split(".")) if self.business else sql.SQL("(VALUES (0))")
        with connection.transaction():
            self._run(connection, "create_staging", columns=sql.SQL(", ").join(columns), source=source)
            if self.comes_in_order:
                self._run(connection, "index_staging")
            connection.execute(self._statement("register"), {"staging": self.name, "job_id": job_id})

    def create_leased(self, connection: psycopg.Connection[tuple[Any, ...]], job_id: str) -> None:
        """Create the table, unless another task has, and lease it for the job."""
        with connection.transaction():
            self._run(connection, "create_alone")
            if not self._run(connection, "staging_exists").rowcount:
                self.create(connection, job_id)
            self.lease(connection)

    def lease(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Keep the table for another hour."""
        self._run(connection, "lease")

    def end_lease(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Allow any job to remove the table from now on."""
        self._run(connection, "end_lease")

    def drop(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Remove the table. If a task whose attempt was not accepted still writes to it, a later job removes it."""
        with connection.transaction():
            self.end_lease(connection)
        drop_unless_used(connection, self.outbox, self.name, self.identifier)

    def _run(
        self, connection: psycopg.Connection[tuple[Any, ...]], name: str, **parts: sql.Composable
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        return connection.execute(self._statement(name, **parts), {"staging": self.name})

    def _statement(self, name: str, **parts: sql.Composable) -> sql.Composed:
        quoted = sql.Literal(self.identifier.as_string())
        return statement("staging", name, self.outbox, staging=self.identifier, quoted_staging=quoted, **parts)


def new_staging_table(
    outbox: str, form: EventForm | RowForm, business: str | None, known_as: str | None
) -> StagingTable:
    """A staging table with a name that no other one has.

    Args:
        outbox: the outbox's name with its schema.
        form: of the rows.
        business: the business table that receives the business rows; None where there are events alone.
        known_as: the outbox's name as the user gave it, if it differs from `outbox`.

    Raises:
        BusinessColumnWrong: Postgres cannot have a table with so many columns.
    """
    table = StagingTable(outbox, f"{PREFIX}{uuid.uuid4().hex}", form, business, known_as)
    if (excess := len(table.columns) - MAX_COLUMNS) > 0:
        given = len(form.business)
        raise BusinessColumnWrong(
            f"the DataFrame has {given} business columns; expected {given - excess} or fewer, because its staging "
            f"table has columns of its own, and Postgres allows {MAX_COLUMNS}"
        )
    return table


@dataclass(frozen=True)
class StageTask:
    """Copies a partition's Arrow batches. It can be pickled, since Spark sends it to its workers."""

    dsn: str = field(repr=False)  # It may hold a password.
    table: StagingTable
    dead_letter: bool = False  # Bad events become dead letters. If False, the first one fails the job.
    leased_for: str | None = None  # The job whose tasks create and lease the table. None: the driver's session owns it.

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Attempt:
        """Copy `batches` in one transaction.

        The copying stops at the first bad event, unless bad events become dead letters. It always stops at a business
        row that Postgres cannot store.
        """
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        attempt = uuid.uuid4()
        with closing(_connected(self.dsn)) as connection:
            limits = self._prepare(connection)
            try:
                return self._copied(batches, connection, limits, partition, attempt)
            except psycopg.Error as error:
                if (refused := self._problem_of(error)) is None:
                    raise
                return Attempt(attempt.hex, partition, 0, refused=refused)

    def _copied(
        self,
        batches: Iterator[pa.RecordBatch],
        connection: psycopg.Connection[tuple[Any, ...]],
        limits: TableLimits,
        partition: int,
        attempt: uuid.UUID,
    ) -> Attempt:
        first = partition << PARTITION_BITS
        rows, dead_letters = 0, 0
        binary = self.table.form.binary
        with connection.transaction(), connection.cursor() as cursor:
            with cursor.copy(self._copy_statement()) as copy:
                copy.write(BINARY_START if binary else b"")
                for batch in batches:
                    if not batch.num_rows:
                        continue
                    converted = self.table.form.convert(batch, limits)
                    if converted.refused:
                        return Attempt(attempt.hex, partition, 0, refused=converted.refused)
                    if converted.bad and not self.dead_letter:
                        return Attempt(attempt.hex, partition, 0, 0, converted.bad[min(converted.bad)])
                    ordinals = pa.array(np.arange(first + rows, first + rows + batch.num_rows))
                    columns = [ordinals, *converted.columns]
                    copy.write(binary_rows(attempt, columns) if binary else csv_rows(attempt, columns))
                    rows += batch.num_rows
                    dead_letters += len(converted.bad)
                copy.write(BINARY_END if binary else b"")
            if self.leased_for:
                self.table.lease(connection)
        return Attempt(attempt.hex, partition, rows - dead_letters, dead_letters)

    def _problem_of(self, error: psycopg.Error) -> RowProblem | None:
        """The business column and the value that Postgres has refused; None if no business column is at fault."""
        where = _BUSINESS_COLUMN.search(error.diag.context or "")
        if where is None:
            return None
        number, value = where.groups()
        return RowProblem(self.table.form.business[int(number)], f"{error.diag.message_primary}{value}")

    def _prepare(self, connection: psycopg.Connection[tuple[Any, ...]]) -> TableLimits:
        if self.leased_for:
            self.table.create_leased(connection, self.leased_for)
        found = connection.execute(statement("staging", "limits", self.table.outbox)).fetchall()
        characters = dict(found)
        return TableLimits(
            characters.get("kafka_key"),
            characters.get("kafka_value"),
            self.table.form.may_be_whole and takes_whole_records(connection, self.table.outbox),
        )

    def _copy_statement(self) -> sql.Composed:
        columns = self.table.columns
        return sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT {}, ENCODING 'UTF8')").format(
            self.table.identifier,
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL("binary" if self.table.form.binary else "csv"),
        )


def _connected(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Connect, and wait if Postgres is restarting: Spark allows a task only a few attempts."""
    connection = retry_connecting(partial(psycopg.connect, dsn, application_name="outbox spark task", autocommit=True))
    connection.isolation_level = ISOLATION
    return connection


def retry_connecting(connect: Callable[[], C]) -> C:
    """Connect. While Postgres is restarting, try again for `RESTART_SECONDS`."""
    deadline = time.monotonic() + RESTART_SECONDS
    while True:
        try:
            return connect()
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def row_column(number: int) -> str:
    """The name that the staging table has for the business column with this number."""
    return f"row_{number}"


def identifier(*names: str) -> sql.Composable:
    """A user's name of a table or a column, for a statement with parameters: psycopg would take a % for a parameter."""
    return sql.SQL(sql.Identifier(*names).as_string().replace("%", "%%"))
