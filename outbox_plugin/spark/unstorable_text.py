"""Finds, in Arrow columns, text that Postgres cannot store, and replaces it. Whole columns at a time; no I/O.

Spark does not check its strings: a string column can hold any bytes, for example those of `CAST(X'FF' AS STRING)`.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox_plugin.spark.json_text import element_offsets, entries


class Decoded(NamedTuple):
    """Values in which bytes that are not UTF-8 are replaced by U+FFFD, and which rows had such bytes."""

    values: pa.Array
    undecodable: pa.Array


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def as_bytes(values: pa.Array) -> pa.Array:
    """Strings and bytes as bytes, any other scalar as the bytes of its text."""
    if pa.types.is_large_string(values.type):
        return values.cast(pa.large_binary())
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        return values
    return values.cast(pa.string()).cast(pa.binary())


def decoded(values: pa.Array) -> Decoded:
    """A column of scalars as text."""
    raw = as_bytes(values)
    try:
        return Decoded(raw.cast(pa.string()), _nowhere(len(raw)))
    except pa.ArrowInvalid:
        texts = [None if each is None else bytes(each).decode(errors="replace") for each in raw.to_pylist()]
        replaced = pa.array(texts, pa.string())
        wrong = pc.not_equal(replaced.cast(pa.binary()), raw.cast(pa.binary()))
        return Decoded(replaced, pc.fill_null(wrong, fill_value=False))


def decoded_document(values: pa.Array) -> Decoded:
    """A column of structs, maps or arrays, with every text in it decoded."""
    kind = values.type
    if is_text(kind):
        return decoded(values)
    if pa.types.is_struct(kind):
        parts = [decoded_document(column) for column in values.flatten()]
        wrong = reduce(pc.or_, (part.undecodable for part in parts), _nowhere(len(values)))
        if not pc.any(wrong).as_py():
            return Decoded(values, wrong)
        names = [field.name for field in kind]
        return Decoded(pa.StructArray.from_arrays([part.values for part in parts], names, mask=values.is_null()), wrong)
    if pa.types.is_map(kind):
        pairs = decoded_document(entries(values))
        if not pc.any(pairs.undecodable).as_py():
            return Decoded(values, pairs.undecodable)
        keys, items = pairs.values.flatten().flatten()
        return Decoded(pa.MapArray.from_arrays(_offsets(pairs.values), keys, items), pairs.undecodable)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        elements = decoded_document(values.flatten())
        wrong = lists_with(values, elements.undecodable)
        if not pc.any(wrong).as_py():
            return Decoded(values, wrong)
        return Decoded(pa.ListArray.from_arrays(_offsets(values), elements.values), wrong)
    return Decoded(values, _nowhere(len(values)))


def lists_with(lists: pa.Array, elements: pa.Array) -> pa.Array:
    """Which of the lists have an element that `elements` marks."""
    if not pc.any(elements).as_py():
        return _nowhere(len(lists))
    lengths = np.asarray(pc.fill_null(pc.list_value_length(lists), 0))
    marked = np.zeros(len(lists), bool)
    marked[np.repeat(np.arange(len(lists)), lengths)[np.asarray(elements)]] = True
    return pa.array(marked)


def with_nul(texts: pa.Array) -> pa.Array:
    """Which texts, or lists of texts, have the character NUL. Values are searched only if the column has a 0 byte."""
    listed = pa.types.is_list(texts.type)
    each = texts.flatten() if listed else texts
    stored = each.buffers()[2]
    if stored is None or b"\0" not in stored.to_pybytes():
        return _nowhere(len(texts))
    found = pc.fill_null(pc.match_substring(each, "\0"), fill_value=False)
    return lists_with(texts, found) if listed else found


def without_nul(texts: pa.Array) -> pa.Array:
    """Texts, or lists of texts, with NUL replaced by U+FFFD."""
    if pa.types.is_list(texts.type):
        return pa.ListArray.from_arrays(element_offsets(texts), without_nul(texts.flatten()))
    return pc.replace_substring(texts, "\0", "\N{REPLACEMENT CHARACTER}")


def _nowhere(rows: int) -> pa.Array:
    return pa.repeat(False, rows)


def _offsets(lists: pa.Array) -> pa.Array:
    """Where each list begins in the result of `flatten`, null for a null list; and where the last list ends."""
    known = pa.concat_arrays([lists.is_valid(), pa.array([True])])
    return pc.if_else(known, element_offsets(lists), pa.scalar(None, pa.int32()))
