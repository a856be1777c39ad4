"""Arrow columns as text: JSON documents, and arrays as Postgres reads them. Whole columns at a time; no I/O.

The form is that of Spark's `to_json`, with nulls kept. Only timestamps differ: they are in UTC with all their digits,
whatever the session's time zone is.
"""

from __future__ import annotations

import base64
import json

import pyarrow as pa
import pyarrow.compute as pc

_CONTROL = r"[\x00-\x1f]"


def json_text(values: pa.Array) -> pa.Array:
    """Each value as a JSON document; null stays null."""
    kind = values.type
    if pa.types.is_struct(kind):
        return _struct_text(values)
    if pa.types.is_map(kind):
        return _map_text(values)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _wrapped("[", joined(values, _known(json_text(values.flatten()))), "]")
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return values.cast(pa.string())
    if pa.types.is_floating(kind):
        return _float_text(values)
    return _quoted(_plain_text(values))


def array_literal(lists: pa.Array) -> pa.Array:
    """Lists of strings as Postgres writes them: `{"a",NULL}`."""
    escaped = pc.replace_substring_regex(lists.flatten(), r'(["\\])', r"\\\1")
    return _wrapped("{", joined(lists, pc.fill_null(_wrapped('"', escaped, '"'), "NULL")), "}")


def joined(lists: pa.Array, texts: pa.Array) -> pa.Array:
    """Join each list's elements with commas; `texts` holds the elements of all lists end to end. Null stays null."""
    together = pc.binary_join(pa.ListArray.from_arrays(element_offsets(lists), texts.cast(pa.string())), ",")
    return pc.if_else(lists.is_valid(), together, pa.scalar(None, pa.string()))


def element_offsets(lists: pa.Array) -> pa.Int32Array:
    """Where each list's elements begin in the result of `flatten`, and where the last end; a null list has none."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])


def entries(maps: pa.Array) -> pa.Array:
    """A map column as a list of structs."""
    kind = maps.type
    return maps.cast(pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])))


def _struct_text(values: pa.StructArray) -> pa.Array:
    parts = [
        _wrapped(json.dumps(field.name, ensure_ascii=False) + ":", _known(json_text(column)), "")
        for field, column in zip(values.type, values.flatten(), strict=True)
    ]
    body = pc.binary_join_element_wise(*parts, ",") if parts else pa.array([""] * len(values), pa.string())
    return pc.if_else(values.is_valid(), _wrapped("{", body, "}"), pa.scalar(None, pa.string()))


def _map_text(values: pa.MapArray) -> pa.Array:
    pairs = entries(values)
    keys, items = pairs.flatten().flatten()
    texts = pc.binary_join_element_wise(_quoted(_plain_text(keys)), _known(json_text(items)), ":")
    return _wrapped("{", joined(pairs, texts), "}")


def _float_text(values: pa.Array) -> pa.Array:
    texts = values.cast(pa.string())
    if pc.all(pc.is_finite(values)).as_py() in (True, None):
        return texts
    named = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
    return pa.array([named.get(text, text) for text in texts.to_pylist()], pa.string())


def _plain_text(values: pa.Array) -> pa.Array:
    """Each value as text, without quotes, and not yet escaped."""
    kind = values.type
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz else ""
        return pc.strftime(values.cast(pa.timestamp(kind.unit)), f"%Y-%m-%dT%H:%M:%S{zone}")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        texts = [None if each is None else base64.b64encode(each).decode() for each in values.to_pylist()]
        return pa.array(texts, pa.string())
    return values.cast(pa.string())


def _quoted(texts: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(texts, _CONTROL)).as_py():
        return pa.array(
            [None if text is None else json.dumps(text, ensure_ascii=False) for text in texts.to_pylist()], pa.string()
        )
    return _wrapped('"', pc.replace_substring_regex(texts, r'(["\\])', r"\\\1"), '"')


def _wrapped(before: str, texts: pa.Array, after: str) -> pa.Array:
    """Put `before` and `after` around each text; null stays null."""
    return pc.binary_join_element_wise(before, texts, after, "")


def _known(texts: pa.Array) -> pa.Array:
    return pc.fill_null(texts, "null")
