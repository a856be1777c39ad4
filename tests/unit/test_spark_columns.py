"""Text that Postgres cannot store is found before it is copied, in whatever column it stands."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from outbox_plugin.spark.columns import Converted, EventColumnWrong, event_form, row_form
from outbox_plugin.spark.copy_format import csv_rows
from outbox_plugin.spark.row_problems import TableLimits

NUL, NOT_UTF8 = b"a\0b", b"a\xffb"
PAIR = pa.struct([("key", pa.string()), ("value", pa.string())])
HEADERS = pa.list_(PAIR)


def strings(*values: bytes | None) -> pa.Array:
    """Text as Spark hands it over: a string column holds any bytes there."""
    plain = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(plain), *plain.buffers()[1:], plain.buffers()[0])


def converted(columns: dict[str, pa.Array], *, order_by: list[str] | None = None, business: bool = False) -> Converted:
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    spark_schema = _spark_schema(schema)
    rows = row_form(spark_schema, ["key", "value", "topic", "headers"]) if business else None
    form = event_form(spark_schema, "t", order_by or [], rows)
    return form.convert(pa.RecordBatch.from_arrays(list(columns.values()), schema=schema), TableLimits())


def _spark_schema(schema: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


@pytest.mark.parametrize(("wrong", "said"), [(NUL, "NUL"), (NOT_UTF8, "not UTF-8")])
@pytest.mark.parametrize("column", ["key", "value", "placed_at"])
def test_a_string_that_cannot_be_stored_makes_its_event_a_bad_one(column: str, wrong: bytes, said: str) -> None:
    columns = {name: strings(b"k1", b"k2", b"k3") for name in ("key", "value", "placed_at")}
    columns[column] = strings(b"k1", wrong, b"k3")
    [(row, bad)] = converted(columns, order_by=["placed_at"]).bad.items()
    assert (row, bad.column) == (1, column)
    assert said in bad.problem
    assert "with topic 't' and key 'k2'" in bad.problem or column == "key"


@pytest.mark.parametrize("half", ["name", "text"])
def test_so_does_one_in_the_headers(half: str) -> None:
    fine, wrong = strings(b"a", b"b"), strings(b"a", NOT_UTF8)
    names, texts = (wrong, fine) if half == "name" else (fine, wrong)
    pairs = pa.StructArray.from_arrays([names, texts], fields=list(PAIR))
    columns = {"key": strings(b"k1", b"k2"), "value": strings(b"v", b"v")}
    columns["headers"] = pa.ListArray.from_arrays([0, 1, 2], pairs)
    [(row, bad)] = converted(columns).bad.items()
    assert (row, bad.column) == (1, "headers")


DOCUMENTS = {
    "struct": lambda texts: pa.StructArray.from_arrays([texts], ["name"]),
    "list": lambda texts: pa.ListArray.from_arrays([0, 1, 2, 3], texts),
    "map": lambda texts: pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["a", "b", "c"]), texts),
    "nested": lambda texts: pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2, 3], texts)], ["names"]),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_so_does_one_within_a_document(kind: str) -> None:
    """Beside a text with a line feed, which is escaped in another way."""
    values = DOCUMENTS[kind](strings(b"a\n", NOT_UTF8, None))
    for batch in (values, values.slice(1)):
        found = converted({"key": strings(b"k1", b"k2", b"k3").slice(3 - len(batch)), "value": batch}).bad
        assert [(row, bad.column) for row, bad in found.items()] == [(len(batch) - 2, "value")]


@pytest.mark.parametrize(("wrong", "said"), [(NUL, "NUL"), (NOT_UTF8, "not UTF-8")])
def test_one_in_a_business_row_is_named_by_the_events_key(wrong: bytes, said: str) -> None:
    columns = {name: strings(b"k1", b"k2") for name in ("key", "value")}
    refused = converted({**columns, "name": strings(b"fine", wrong)}, business=True).refused
    assert refused is not None
    assert refused.column == "name"
    assert said in refused.problem
    assert "key 'k2'" in refused.problem


def test_one_in_a_business_row_without_an_event_is_named_by_the_first_column() -> None:
    schema = StructType([StructField("number", StringType()), StructField("name", StringType())])
    columns = [strings(b"1", b"2"), strings(b"fine", NUL)]
    batch = pa.RecordBatch.from_arrays(columns, ["number", "name"])
    refused = row_form(schema).convert(batch, TableLimits()).refused
    assert refused is not None
    assert refused.column == "name"
    assert "number '2'" in refused.problem


def test_bytes_of_a_business_row_may_be_any() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([NUL, NOT_UTF8])], ["content"])
    form = row_form(StructType([StructField("content", BinaryType())]))
    assert form.convert(batch, TableLimits()).refused is None


@pytest.mark.parametrize("zone", ["GMT+08:00", "UTC+8", "PST", "+08:00", "America/New_York", "Z"])
def test_an_instant_is_copied_as_what_it_is_whatever_the_sessions_time_zone(zone: str) -> None:
    """Spark knows zones that Arrow does not."""
    instants: list[Any] = [datetime(2020, 1, 2, 3, 4, 5, 6, UTC), None]
    copied = bytes(csv_rows(uuid.uuid4(), [pa.array(instants, pa.timestamp("us", zone))])).decode()
    assert [line.partition(",")[2] for line in copied.splitlines()] == ['"2020-01-02 03:04:05.000006Z"', ""]


def test_events_are_not_sorted_by_a_collation_that_postgres_may_lack() -> None:
    fields = [StructField("key", StringType()), StructField("value", StringType())]
    schema = StructType([*fields, StructField("name", StringType("UNICODE_CI"))])
    with pytest.raises(EventColumnWrong, match="'name' is string collate UNICODE_CI: events cannot be sorted by that"):
        event_form(schema, "t", ["name"])
