"""A row that the outbox or Kafka would refuse is found, and named by its key and column."""

from __future__ import annotations

import pyarrow as pa
import pytest

from outbox_plugin.spark.row_problems import TableLimits, row_problems

COLUMNS = ("kafka_topic", "kafka_key", "kafka_value", "kafka_header_keys", "kafka_header_values")
Row = tuple[str | list[str] | None, ...]
GOOD: Row = ("topic", "key", "value", [], [])


def batch(*rows: Row) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    types = [pa.string()] * 3 + [pa.list_(pa.string())] * 2
    return pa.RecordBatch.from_arrays(list(map(pa.array, columns, types)), list(COLUMNS))


@pytest.mark.parametrize("rows", [[], [GOOD], [GOOD, ("a.b_c-1", "ü" * 100, None, [], [])], [("t" * 249, *GOOD[1:])]])
def test_good_rows_are_good(rows: list[Row]) -> None:
    assert row_problems(batch(*rows), {}, TableLimits()) == {}


@pytest.mark.parametrize(
    ("row", "column", "said"),
    [
        (("topic", None, "v", [], []), "key", "null, of the event with topic 'topic' and key null"),
        (("topic", "k" * 101, "v", [], []), "key", "101 characters"),
        ((None, "k7", "v", [], []), "topic", "with topic null and key 'k7'"),
        (("", "k7", "v", [], []), "topic", "with topic '' and key 'k7'"),
        (("bad topic!", "k7", "v", [], []), "topic", "with topic 'bad topic!' and key 'k7'"),
        (("topic\n", "k7", "v", [], []), "topic", "not a name that Kafka allows"),
        (("t" * 250, "k7", "v", [], []), "topic", "not a name that Kafka allows"),
        (("topic", "k7", "a\0b", [], []), "value", "NUL"),
        (("topic", "k7", "v", ["a"], ["\0"]), "headers", "NUL"),
        (("topic", "k7", "v", ["a", ""], ["1", "2"]), "headers", "has one without a name"),
    ],
)
def test_a_bad_row_is_named(row: Row, column: str, said: str) -> None:
    found = row_problems(batch(GOOD, row, GOOD), {}, TableLimits())
    assert list(found) == [1]
    assert found[1].column == column
    assert said in found[1].problem


def test_what_fits_is_what_the_table_says() -> None:
    rows = batch(GOOD, ("topic", "k7", "é" * 11, [], []), ("topic", "k" * 101, "v", [], []))
    found = row_problems(rows, {}, TableLimits(key=None, value=10))
    assert found == {
        1: ("value", "11 characters, of which 10 are allowed, of the event with topic 'topic' and key 'k7'")
    }


def test_bytes_that_are_no_text_are_named_by_their_column() -> None:
    found = row_problems(batch(GOOD, GOOD), {"value": pa.array([False, True])}, TableLimits())
    assert found[1].column == "value"
    assert "not UTF-8" in found[1].problem


def test_the_first_thing_that_is_wrong_with_a_row_is_said() -> None:
    found = row_problems(batch((None, None, "a\0b", [], []), GOOD, ("", "k", "v", [], [])), {}, TableLimits())
    assert {row: bad.column for row, bad in found.items()} == {0: "key", 2: "topic"}
