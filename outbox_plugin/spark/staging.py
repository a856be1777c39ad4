"""What a Spark task does: copy its partition into a staging table, under an attempt id of its own.

Runs in Spark's Python workers, which import this module afresh.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv
from pyspark import TaskContext

ATTEMPT_SCHEMA = "attempt string, rows long"
_ROWS_PER_PARTITION = 1 << 40  # Ordinals of one partition stay below those of the next.


@dataclass(frozen=True)
class StageTask:
    """Copies a partition's Arrow batches; picklable, so that a worker can be handed it."""

    dsn: str
    staging: tuple[str, ...]
    columns: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copy `batches` in one transaction; yields a row of the attempt's id and how many rows it copied."""
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        attempt, rows = uuid.uuid4().hex, 0
        target = sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT csv)").format(
            sql.Identifier(*self.staging),
            sql.SQL(", ").join(map(sql.Identifier, ("attempt", "ordinal", *self.columns))),
        )
        with (
            closing(psycopg.connect(self.dsn, application_name="outbox spark task")) as connection,
            connection.transaction(),
            connection.cursor() as cursor,
            cursor.copy(target) as copy,
        ):
            for batch in batches:
                first = partition * _ROWS_PER_PARTITION + rows
                copy.write(_as_csv(batch, attempt, first))
                rows += batch.num_rows
        yield pa.RecordBatch.from_pydict({"attempt": [attempt], "rows": [rows]})


def _as_csv(batch: pa.RecordBatch, attempt: str, first: int) -> memoryview:
    """The batch as Postgres reads CSV: nulls are bare, and everything else is quoted."""
    count = batch.num_rows
    ordinals = pa.array(range(first, first + count), pa.int64())
    staged = pa.Table.from_arrays(
        [pa.array([attempt] * count), ordinals, *batch.columns], ["attempt", "ordinal", *batch.schema.names]
    )
    body = io.BytesIO()
    csv.write_csv(staged, body, csv.WriteOptions(include_header=False, quoting_style="all_valid"))
    return body.getbuffer()
