"""Events from Spark become the same rows as events from `Outbox.emit`."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from outbox_plugin import Event
from outbox_plugin.emit.row_encoder import MAX_RECORD_BYTES, RowEncoder, as_text
from outbox_plugin.spark.columns import event_form
from outbox_plugin.spark.row_problems import TableLimits

OURS = 2  # Headers of each event that is emitted: its idempotency key and its time.
SCHEMA = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
        "partition": pa.int32(),
    }
)
bodies = st.binary(max_size=60) | st.sampled_from([b"", b"\0", "ü".encode(), b"k" * 100, b"k" * 101, b"\xff" * 49])
batches = st.lists(
    st.tuples(
        bodies,
        st.none() | bodies,
        st.lists(st.tuples(st.text("ab", min_size=1), st.none() | bodies), max_size=3),
        st.none() | st.integers(0, 5),
    ),
    min_size=1,
    max_size=5,
)


def staged(events: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The rows of the staging table, by the names of its columns."""
    form = event_form(from_arrow_schema(SCHEMA), "t")
    columns = [pa.array(column, field.type) for column, field in zip(zip(*events, strict=True), SCHEMA, strict=True)]
    converted = form.convert(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), TableLimits())
    assert converted.bad == {}
    rows: list[dict[str, Any]] = pa.Table.from_arrays(converted.columns, list(form.typed)).to_pylist()
    return rows


@given(batches)
def test_a_row_is_that_of_the_same_event(events: list[tuple[Any, ...]]) -> None:
    encoder = RowEncoder(as_text, None, MAX_RECORD_BYTES)
    for row, (key, value, headers, partition) in zip(staged(events), events, strict=True):
        event = Event(topic="t", key=key, value=value, headers=headers, partition=partition)
        topic, ordering_key, text, names, texts, *whole = encoder.row(event)
        assert (row["kafka_topic"], row["kafka_key"], row["kafka_value"]) == (topic, ordering_key, text)
        assert row["outbox_is_whole"] == bool(whole)
        if not whole:
            assert (row["kafka_header_keys"], row["kafka_header_values"]) == (names[OURS:], texts[OURS:])
            assert (row["kafka_key_bytes"], row["kafka_value_bytes"], row["kafka_partition"]) == (None, None, None)
        else:
            key_bytes, value_bytes, header_bytes, given_partition, _ = whole
            assert row["kafka_header_keys"] == names[1 + OURS :]
            assert row["kafka_header_bytes"] == header_bytes[OURS:]  # type: ignore[index]
            assert (row["kafka_key_bytes"], row["kafka_value_bytes"]) == (key_bytes, value_bytes)
            assert row["kafka_partition"] == given_partition
