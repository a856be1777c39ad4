"""Stages good and bad events; a bad one is staged so that its dead letter holds the original bytes. No I/O.

A dead letter's value is bytes, so it is staged unchanged, in hexadecimal form. Its topic, key and headers are text:
bytes that Postgres cannot store as text are replaced by U+FFFD. A dead letter with replaced bytes must not be retried,
so the problem names the altered columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from outbox_plugin.spark.row_problems import RowProblem
from outbox_plugin.spark.unstorable_text import as_bytes, with_nul, without_nul

_COLUMNS = ("topic", "key", "value", "headers", "headers")  # The DataFrame's names for the outbox's columns.
_VALUE = _COLUMNS.index("value")


def staged_events(
    events: Sequence[pa.Array], value: pa.Array, bad: Mapping[int, RowProblem], undecodable: Mapping[str, pa.Array]
) -> list[pa.Array]:
    """The columns of the outbox, and after them each row's problem: a JSON text, null for a good row.

    Args:
        events: topics, keys, values, header names and header values, as text.
        value: the values in their original bytes, or as JSON if they are documents.
        bad: the bad rows, by their numbers.
        undecodable: for each column, which rows have U+FFFD in place of bytes that are not UTF-8.
    """
    rows = len(value)
    if not bad:
        return [*events, pa.nulls(rows, pa.string())]
    is_bad = pa.array([row in bad for row in range(rows)])
    staged = [without_nul(column) for column in events]
    literals = [None if raw is None else f"\\x{raw.hex()}" for raw in as_bytes(value).filter(is_bad).to_pylist()]
    staged[_VALUE] = pc.replace_with_mask(events[_VALUE], is_bad, pa.array(literals, pa.string()))
    altered = [*undecodable.items()]
    altered += [(name, with_nul(column)) for name, column in zip(_COLUMNS, events, strict=True) if name != "value"]
    problems: list[str | None] = [None] * rows
    for row, wrong in bad.items():
        columns = sorted({name for name, mask in altered if mask[row].as_py()})
        problems[row] = json.dumps({"reason": f"{wrong.column}: {wrong.problem}", "altered": columns})
    return [*staged, pa.array(problems, pa.string())]
