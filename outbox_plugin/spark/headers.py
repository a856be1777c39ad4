"""Divides a column of headers into lists of names and of values. Whole columns at a time; no I/O."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from outbox_plugin.spark.json_text import element_offsets, entries
from outbox_plugin.spark.unstorable_text import as_bytes, decoded, lists_with


class Headers(NamedTuple):
    """The headers of a batch. A row's lists have one length.

    Attributes:
        names: lists of text.
        texts: lists of text, with nulls.
        bodies: the same as bytes.
        wrong_names: the rows with a name that is not UTF-8.
        wrong_texts: the rows with a value that is not UTF-8.
    """

    names: pa.Array
    texts: pa.Array
    bodies: pa.Array
    wrong_names: pa.Array
    wrong_texts: pa.Array


def headers_of(column: pa.Array | None, rows: int) -> Headers:
    """The headers in `column`, a map or a list of structs of key and value; of no row if it is None."""
    if column is None:
        none, nowhere = _empty_lists(rows, pa.string()), pa.repeat(False, rows)
        return Headers(none, none, _empty_lists(rows, pa.binary()), nowhere, nowhere)
    pairs = entries(column) if pa.types.is_map(column.type) else column
    keys, values = pairs.flatten().flatten()
    offsets = element_offsets(pairs)
    names, texts = decoded(keys), decoded(values)
    return Headers(
        pa.ListArray.from_arrays(offsets, pc.fill_null(names.values, "")),
        pa.ListArray.from_arrays(offsets, texts.values),
        pa.ListArray.from_arrays(offsets, as_bytes(values).cast(pa.binary())),
        lists_with(pairs, names.undecodable),
        lists_with(pairs, texts.undecodable),
    )


def _empty_lists(rows: int, kind: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), rows + 1), pa.array([], kind))
