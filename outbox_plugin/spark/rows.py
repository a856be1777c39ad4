"""Finds the rows that the outbox or Kafka would refuse, before anything of their job is written.

A bad row is a result and not a failure: a task that raised would be tried again, to the same end, and its error would
reach the user as a worker's traceback. No I/O; a batch is checked column by column, in Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from outbox_plugin.event import MAX_KEY_CHARACTERS, TOPIC_PATTERN

_SHOWN_CHARACTERS = 40


class BadRow(NamedTuple):
    """What is wrong with a row: the column that the user gave, and the problem, which names the row's key."""

    column: str
    problem: str


class Limits(NamedTuple):
    """How many characters fit into the outbox's columns; None is no limit."""

    key: int | None = MAX_KEY_CHARACTERS
    value: int | None = None


def bad_rows(batch: pa.RecordBatch, undecodable: Mapping[str, pa.Array], limits: Limits) -> dict[int, BadRow]:
    """The rows that are wrong, by their numbers; empty when all are well.

    Args:
        batch: the columns of the outbox, as text.
        undecodable: for the columns that were bytes, which rows have some that are not UTF-8.
        limits: what fits.
    """
    topics, keys = batch.column("kafka_topic"), batch.column("kafka_key")
    found: dict[int, BadRow] = {}
    for column, wrong, problem in _rules(batch, undecodable, limits):
        if pc.any(wrong).as_py():
            for row in pc.indices_nonzero(pc.fill_null(wrong, fill_value=False)).to_pylist():
                who = f"of the event with topic {_shown(topics[row])} and key {_shown(keys[row])}"
                found.setdefault(row, BadRow(column, f"{problem(row)}, {who}"))
    return found


def _rules(
    batch: pa.RecordBatch, undecodable: Mapping[str, pa.Array], limits: Limits
) -> Iterator[tuple[str, pa.Array, Callable[[int], str]]]:
    """A column, the rows in which it is wrong, and what is wrong in a row."""
    topics, keys, values = (batch.column(name) for name in ("kafka_topic", "kafka_key", "kafka_value"))
    yield "key", pc.is_null(keys), lambda _: "null"
    for column, texts, limit in (("key", keys, limits.key), ("value", values, limits.value)):
        if limit is not None:
            yield column, pc.greater(pc.utf8_length(texts), limit), _too_long(texts, limit)
    wrong_topics = pc.unique(topics).filter(pc.invert(_well_named(pc.unique(topics))))
    yield "topic", pc.is_in(topics, wrong_topics), lambda _: "not a name that Kafka allows"
    headers = (batch.column(name) for name in ("kafka_header_keys", "kafka_header_values"))
    for column, texts in (("key", keys), ("value", values), *(("headers", each) for each in headers)):
        yield column, _with_nul(texts), lambda _: "has the character NUL, which Postgres cannot store"
    for column, wrong in undecodable.items():
        yield column, wrong, lambda _: "has bytes that are not UTF-8, which the outbox cannot hold"


def _well_named(topics: pa.Array) -> pa.Array:
    return pc.fill_null(pc.match_substring_regex(topics, TOPIC_PATTERN), fill_value=False)


def _with_nul(texts: pa.Array) -> pa.Array:
    """Which texts, or lists of them, have the character; where no byte of a column is 0, that is soon known."""
    listed = pa.types.is_list(texts.type)
    each = texts.flatten() if listed else texts
    stored = each.buffers()[2]
    if stored is None or b"\0" not in stored.to_pybytes():
        return pa.repeat(False, len(texts))
    found = pc.match_substring(each, "\0")
    if not listed:
        return found
    wrong = set(pc.list_parent_indices(texts).filter(found).to_pylist())
    return pa.array([row in wrong for row in range(len(texts))])


def _too_long(texts: pa.Array, limit: int) -> Callable[[int], str]:
    return lambda row: f"{len(texts[row].as_py())} characters, of which {limit} are allowed"


def _shown(text: pa.StringScalar) -> str:
    whole = text.as_py()
    if whole is None:
        return "null"
    return repr(whole if len(whole) <= _SHOWN_CHARACTERS else f"{whole[:_SHOWN_CHARACTERS]}…")
