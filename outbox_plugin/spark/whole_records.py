"""Finds the events that are whole records, and makes the columns that hold them. Whole columns at a time; no I/O.

`core.whole_record` says what a whole record is. Only columns of bytes can hold what is no text: a string that is not
UTF-8 is a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from outbox_plugin.core.whole_record import ordering_key
from outbox_plugin.emit.event import MAX_KEY_CHARACTERS
from outbox_plugin.spark.headers import Headers
from outbox_plugin.spark.unstorable_text import as_bytes, with_nul, without_nul

# The staging table's columns, each with an SQL value that gives it its type.
WHOLE_COLUMNS = {
    "outbox_is_whole": "true",
    "kafka_key_bytes": "''::bytea",
    "kafka_value_bytes": "''::bytea",
    "kafka_header_bytes": "ARRAY[]::bytea[]",
    "kafka_partition": "0::bigint",
}


class WholeRecords(NamedTuple):
    """A batch of events, some of which are whole records.

    Attributes:
        keys: the keys by which the events are ordered.
        values: null where the value is no text.
        texts: the values of headers, without NUL.
        staged: the columns of `WHOLE_COLUMNS`.
        no_text: for each of the DataFrame's columns, the rows in which it has what the text beside it does not say.
    """

    keys: pa.Array
    values: pa.Array
    texts: pa.Array
    staged: list[pa.Array]
    no_text: dict[str, pa.Array]


def whole_records(
    columns: Mapping[str, pa.Array],
    keys: pa.Array,
    values: pa.Array,
    headers: Headers,
    undecodable: Mapping[str, pa.Array],
) -> WholeRecords:
    """Divide the events into whole records and others.

    Args:
        columns: the DataFrame's: those of `key`, `value` and `headers` that hold bytes, and `partition` if the events
            name theirs.
        keys: as text, with U+FFFD in place of bytes that are not UTF-8.
        values: like `keys`.
        headers: the events' headers.
        undecodable: for `key` and `value`, the rows with bytes that are not UTF-8.
    """
    rows, texts = len(keys), headers.texts
    key_bytes = value_bytes = pa.nulls(rows, pa.binary())
    partitions = columns["partition"].cast(pa.int64()) if "partition" in columns else pa.nulls(rows, pa.int64())
    no_text = {"partition": partitions.is_valid()}
    if "key" in columns:
        is_long = pc.fill_null(pc.greater(pc.utf8_length(keys), MAX_KEY_CHARACTERS), fill_value=False)
        no_text["key"] = pc.or_(_no_text(keys, undecodable["key"]), is_long)
        key_bytes = _where(no_text["key"], as_bytes(columns["key"]))
        ordering = [ordering_key(key, MAX_KEY_CHARACTERS) for key in key_bytes.filter(no_text["key"]).to_pylist()]
        keys = pc.replace_with_mask(keys, no_text["key"], pa.array(ordering, pa.string()))
    if "value" in columns:
        no_text["value"] = _no_text(values, undecodable["value"])
        value_bytes = _where(no_text["value"], as_bytes(columns["value"]))
        values = _where(pc.invert(no_text["value"]), values)
    if "headers" in columns:
        no_text["headers"] = _no_text(texts, headers.wrong_texts)
        texts = without_nul(texts)
    is_whole = reduce(pc.or_, no_text.values())
    return WholeRecords(keys, values, texts, [is_whole, key_bytes, value_bytes, headers.bodies, partitions], no_text)


def no_whole_records(headers: Headers) -> list[pa.Array]:
    """The columns of `WHOLE_COLUMNS` for an outbox that cannot hold whole records."""
    rows = len(headers.bodies)
    none = pa.nulls(rows, pa.binary())
    return [pa.repeat(False, rows), none, none, headers.bodies, pa.nulls(rows, pa.int64())]


def _no_text(texts: pa.Array, undecodable: pa.Array) -> pa.Array:
    return pc.or_(undecodable, pc.fill_null(with_nul(texts), fill_value=False))


def _where(mask: pa.Array, values: pa.Array) -> pa.Array:
    return pc.if_else(mask, values, pa.scalar(None, values.type))
