"""Arrow columns reach Postgres as what they are, in either form of COPY."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from outbox_plugin.spark.copy_format import BINARY_END, BINARY_START, binary_rows, csv_rows

pytestmark = pytest.mark.spark

ATTEMPT = uuid.uuid4()
COLUMNS: list[tuple[str, pa.DataType, list[Any]]] = [
    ("text", pa.string(), ["", "a", None, "ä,\"'\\\t\n\r ", "x" * 70_000]),
    ("text", pa.null(), [None, None]),
    ("bigint", pa.int64(), [0, -1, None, 2**63 - 1, -(2**63)]),
    ("bigint", pa.int16(), [0, None, -32_768, 32_767]),
    ("float8", pa.float64(), [0.0, -1.5, None, float("inf"), 1e300, 5e-324]),
    ("float8", pa.float32(), [0.5, None, -2.0]),
    ("boolean", pa.bool_(), [True, False, None]),
    ("date", pa.date32(), [date(2000, 1, 1), None, date(1, 1, 1), date(9999, 12, 31), date(1970, 1, 1)]),
    ("timestamptz", pa.timestamp("us", "America/New_York"), [datetime(2013, 1, 1, 5, 0, 0, 123, UTC), None]),
    ("timestamptz", pa.timestamp("us", "UTC"), [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)]),
    ("timestamp", pa.timestamp("us"), [datetime(1999, 12, 31, 23, 59, 59, 999_999), None]),
    ("text[]", pa.list_(pa.string()), [[], ["a"], ["", 'q"\\', "ä,{}", "NULL"], [], ["x" * 70_000, "b"]]),
]


def stored(dsn: str, kind: str, column: pa.Array, *, binary: bool) -> list[Any]:
    numbers = pa.array(np.arange(len(column)))
    rows = binary_rows(ATTEMPT, [numbers, column]) if binary else csv_rows(ATTEMPT, [numbers, column])
    with psycopg.connect(dsn) as connection:
        connection.execute(f"SET TimeZone TO 'UTC'; CREATE TABLE staged (attempt uuid, number bigint, held {kind})")
        with connection.cursor().copy(f"COPY staged FROM STDIN (FORMAT {'binary' if binary else 'csv'})") as copy:
            copy.write(BINARY_START + bytes(rows) + BINARY_END if binary else rows)
        found = connection.execute("SELECT held FROM staged WHERE attempt = %s ORDER BY number", [ATTEMPT]).fetchall()
        connection.rollback()
    return [held for (held,) in found]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("kind", "arrow", "values"), COLUMNS, ids=lambda each: str(each) if each is not list else "")
def test_what_is_copied_is_what_was_there(
    dsn: str, kind: str, arrow: pa.DataType, values: list[Any], binary: bool
) -> None:
    column = pa.array(values, arrow)
    assert stored(dsn, kind, column, binary=binary) == values
    assert stored(dsn, kind, column.slice(1), binary=binary) == values[1:]  # Spark's batches may be slices.


def test_no_rows_are_no_rows(dsn: str) -> None:
    assert stored(dsn, "text", pa.array([], pa.string()), binary=True) == []
