"""Finds the row that the outbox or Kafka would refuse, before anything of its job is written.

A bad row is a result and not a failure: a task that raised would be tried again, to the same end, and its error would
reach the user as a worker's traceback. No I/O; a batch is checked column by column, in Arrow.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from outbox_plugin.event import MAX_KEY_CHARACTERS, TOPIC_PATTERN

_SHOWN_CHARACTERS = 40


class BadRow(NamedTuple):
    """What is wrong with a row: the column that the user gave, and the problem, which names the row's key."""

    column: str
    problem: str


def first_bad_row(batch: pa.RecordBatch) -> BadRow | None:
    """The first row of the first column in which one is wrong; None when all rows are well.

    Args:
        batch: the columns of the outbox, as `columns.outbox_columns` makes them.
    """
    topics, keys, values = (batch.column(name) for name in ("kafka_topic", "kafka_key", "kafka_value"))

    def of_key(row: int) -> str:
        return f"of the event with topic {_shown(topics[row])} and key {_shown(keys[row])}"

    if (row := _first(pc.is_null(keys))) is not None:
        return BadRow("key", f"null, {of_key(row)}")
    if (row := _first(pc.greater(pc.utf8_length(keys), MAX_KEY_CHARACTERS))) is not None:
        length = len(keys[row].as_py())
        return BadRow("key", f"{length} characters, of which {MAX_KEY_CHARACTERS} are allowed, {of_key(row)}")
    well_named = pc.fill_null(pc.match_substring_regex(topics, TOPIC_PATTERN), fill_value=False)
    if (row := _first(pc.invert(well_named))) is not None:
        return BadRow("topic", f"not a name that Kafka allows, {of_key(row)}")
    headers = (batch.column(name) for name in ("kafka_header_keys", "kafka_header_values"))
    for column, texts in (("key", keys), ("value", values), *(("headers", each) for each in headers)):
        if (row := _first(pc.match_substring(texts, "\0"))) is not None:
            return BadRow(column, f"has the character NUL, which Postgres cannot store, {of_key(row)}")
    return None


def _first(wrong: pa.BooleanArray) -> int | None:
    row = pc.index(wrong, value=True).as_py()
    return None if row < 0 else int(row)


def _shown(text: pa.StringScalar) -> str:
    whole = text.as_py()
    if whole is None:
        return "null"
    return repr(whole if len(whole) <= _SHOWN_CHARACTERS else f"{whole[:_SHOWN_CHARACTERS]}…")
