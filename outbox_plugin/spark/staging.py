"""What a Spark task does: copy its partition into a staging table, under an attempt id of its own.

Runs in Spark's Python workers, which import this module afresh.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv
from pyspark import TaskContext

from outbox_plugin.spark.rows import BadRow

ATTEMPT_SCHEMA = "attempt string, rows long, bad_column string, problem string"
_ROWS_PER_PARTITION = 1 << 40  # Ordinals of one partition stay below those of the next.


@dataclass(frozen=True)
class StageTask:
    """Copies a partition's Arrow batches; picklable, so that a worker can be handed it."""

    dsn: str = field(repr=False)  # It may hold a password.
    staging: tuple[str, ...]
    columns: tuple[str, ...]
    find_bad_row: Callable[[pa.RecordBatch], BadRow | None] | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copy `batches` in one transaction; yields one row.

        That is the attempt's id and how many rows it copied or, when a row is bad, what is wrong with it.
        """
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        attempt, rows = uuid.uuid4().hex, 0
        bad: BadRow | None = None
        target = sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT csv)").format(
            sql.Identifier(*self.staging),
            sql.SQL(", ").join(map(sql.Identifier, ("outbox_attempt", "outbox_ordinal", *self.columns))),
        )
        with (
            closing(psycopg.connect(self.dsn, application_name="outbox spark task")) as connection,
            connection.transaction(),
            connection.cursor() as cursor,
            cursor.copy(target) as copy,
        ):
            for batch in batches:
                if bad := self.find_bad_row(batch) if self.find_bad_row else None:
                    break  # The driver refuses the job, so what has been copied is never published.
                first = partition * _ROWS_PER_PARTITION + rows
                copy.write(_as_csv(batch, attempt, first))
                rows += batch.num_rows
        column, problem = bad or (None, None)
        yield pa.RecordBatch.from_arrays(
            [pa.array([attempt]), pa.array([rows]), pa.array([column], pa.string()), pa.array([problem], pa.string())],
            ["attempt", "rows", "bad_column", "problem"],
        )


def _as_csv(batch: pa.RecordBatch, attempt: str, first: int) -> memoryview:
    """The batch as Postgres reads CSV: nulls are bare, and everything else is quoted."""
    count = batch.num_rows
    ordinals = pa.array(range(first, first + count), pa.int64())
    staged = pa.Table.from_arrays(
        [pa.array([attempt] * count), ordinals, *batch.columns],
        ["outbox_attempt", "outbox_ordinal", *batch.schema.names],
    )
    body = io.BytesIO()
    csv.write_csv(staged, body, csv.WriteOptions(include_header=False, quoting_style="all_valid"))
    return body.getbuffer()
