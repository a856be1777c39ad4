"""A row that the outbox or Kafka would refuse is found, and named by its key and column."""

from __future__ import annotations

import pyarrow as pa
import pytest

from outbox_plugin.spark.rows import first_bad_row

COLUMNS = ("kafka_topic", "kafka_key", "kafka_value", "kafka_header_keys", "kafka_header_values")
GOOD = ("topic", "key", "value", "{}", "{}")


def batch(*rows: tuple[str | None, ...]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(COLUMNS)
    return pa.RecordBatch.from_arrays([pa.array(column, pa.string()) for column in columns], list(COLUMNS))


@pytest.mark.parametrize(
    "rows", [[], [GOOD], [GOOD, ("a.b_c-1", "ü" * 100, None, "{}", "{}")], [("t" * 249, *GOOD[1:])]]
)
def test_good_rows_are_good(rows: list[tuple[str | None, ...]]) -> None:
    assert first_bad_row(batch(*rows)) is None


@pytest.mark.parametrize(
    ("row", "column", "said"),
    [
        (("topic", None, "v", "{}", "{}"), "key", "null, of the event with topic 'topic' and key null"),
        (("topic", "k" * 101, "v", "{}", "{}"), "key", "101 characters"),
        ((None, "k7", "v", "{}", "{}"), "topic", "with topic null and key 'k7'"),
        (("", "k7", "v", "{}", "{}"), "topic", "with topic '' and key 'k7'"),
        (("bad topic!", "k7", "v", "{}", "{}"), "topic", "with topic 'bad topic!' and key 'k7'"),
        (("topic\n", "k7", "v", "{}", "{}"), "topic", "not a name that Kafka allows"),
        (("t" * 250, "k7", "v", "{}", "{}"), "topic", "not a name that Kafka allows"),
        (("topic", "k7", "a\0b", "{}", "{}"), "value", "NUL"),
        (("topic", "k7", "v", '{"a"}', '{"\0"}'), "headers", "NUL"),
    ],
)
def test_a_bad_row_is_named(row: tuple[str | None, ...], column: str, said: str) -> None:
    found = first_bad_row(batch(GOOD, row, GOOD))
    assert found is not None
    assert found.column == column
    assert said in found.problem
