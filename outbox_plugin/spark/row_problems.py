"""Finds the rows that the outbox or Kafka would refuse, before their job writes anything.

A task returns a bad row as a result and does not raise: Spark would run a failed task again, with the same result, and
show the user a worker's traceback. No I/O; a batch is checked column by column, in Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from outbox_plugin.emit.event import KAFKAS_OWN, MAX_KEY_CHARACTERS, TOPIC_PATTERN
from outbox_plugin.spark.unstorable_text import lists_with, with_nul

_SHOWN_CHARACTERS = 40
MAX_PARTITION = 2**31 - 1
_NUL = "has the character NUL, which Postgres cannot store"


class RowProblem(NamedTuple):
    """What is wrong with a row: the column, as the user named it, and the problem, which names the row's key."""

    column: str
    problem: str


class TableLimits(NamedTuple):
    """What the outbox's columns can hold.

    Attributes:
        key: how many characters of a key; None means any number.
        value: how many characters of a value; None means any number.
        whole_records: whether there are columns for what is no text, and for a partition.
    """

    key: int | None = MAX_KEY_CHARACTERS
    value: int | None = None
    whole_records: bool = True


class Unstorable(NamedTuple):
    """A row with a text that Postgres cannot store: the row's number, the column, and what is wrong with it."""

    row: int
    column: str
    problem: str


def row_problems(
    batch: pa.RecordBatch,
    undecodable: Mapping[str, pa.Array],
    limits: TableLimits,
    order: Mapping[str, pa.Array] | None = None,
    partitions: pa.Array | None = None,
) -> dict[int, RowProblem]:
    """What is wrong with each bad row, by the row's number; empty if all rows are good.

    Args:
        batch: the columns of the outbox, as text.
        undecodable: for each column of text or bytes, which rows have bytes that are not UTF-8.
        limits: what the outbox's columns can hold.
        order: the columns of text that the events are ordered by.
        partitions: the partitions that the events name; null where they name none.
    """
    topics, keys = batch.column("kafka_topic"), batch.column("kafka_key")
    problems: dict[int, RowProblem] = {}
    rules = [*_rules(batch, undecodable, limits, order or {}), *_partition_rules(partitions, limits)]
    for column, wrong, problem in rules:
        if pc.any(wrong).as_py():
            for row in pc.indices_nonzero(pc.fill_null(wrong, fill_value=False)).to_pylist():
                event = event_shown(topics[row], keys[row])
                problems.setdefault(row, RowProblem(column, f"{problem(row)}, of {event}"))
    return problems


def first_unstorable(texts: Mapping[str, pa.Array], undecodable: Mapping[str, pa.Array]) -> Unstorable | None:
    """The first row in which one of the texts cannot be stored.

    Args:
        texts: columns of text, by their names.
        undecodable: for each of them, which rows have bytes that are not UTF-8.
    """
    found: list[Unstorable] = []
    for masks, problem in (
        (undecodable, "has bytes that are not UTF-8, which Postgres cannot store as text"),
        ({name: with_nul(column) for name, column in texts.items()}, _NUL),
    ):
        for name, wrong in masks.items():
            if pc.any(wrong).as_py():
                found.append(Unstorable(pc.index(wrong, value=True).as_py(), name, problem))
    return min(found, default=None)


def event_shown(topic: pa.StringScalar, key: pa.StringScalar) -> str:
    """An event, as an error names it."""
    return f"the event with topic {shown(topic)} and key {shown(key)}"


def shown(value: pa.Scalar) -> str:
    """A value, as an error shows it; a long one is cut."""
    whole = value.as_py()
    if whole is None:
        return "null"
    whole = whole if isinstance(whole, str) else str(whole)
    return repr(whole if len(whole) <= _SHOWN_CHARACTERS else f"{whole[:_SHOWN_CHARACTERS]}…")


def _rules(
    batch: pa.RecordBatch, undecodable: Mapping[str, pa.Array], limits: TableLimits, order: Mapping[str, pa.Array]
) -> Iterator[tuple[str, pa.Array, Callable[[int], str]]]:
    """Each rule: its column, the rows that break it, and a function that says what is wrong in a row."""
    topics, keys, values = (batch.column(name) for name in ("kafka_topic", "kafka_key", "kafka_value"))
    yield "key", pc.is_null(keys), lambda _: "null"
    for column, texts, limit in (("key", keys, limits.key), ("value", values, limits.value)):
        if limit is not None:
            yield column, pc.greater(pc.utf8_length(texts), limit), _too_long(texts, limit)
    wrong_topics = pc.unique(topics).filter(pc.invert(_well_named(pc.unique(topics))))
    yield "topic", pc.is_in(topics, wrong_topics), lambda _: "not a name that Kafka allows"
    names, bodies = (batch.column(name) for name in ("kafka_header_keys", "kafka_header_values"))
    yield "headers", _with_empty(names), lambda _: "has one without a name"
    for column, texts in (("key", keys), ("value", values), ("headers", names), ("headers", bodies), *order.items()):
        yield column, with_nul(texts), lambda _: _NUL
    for column, wrong in undecodable.items():
        yield column, wrong, lambda _: "has bytes that are not UTF-8, which the outbox cannot hold"


def _partition_rules(
    partitions: pa.Array | None, limits: TableLimits
) -> Iterator[tuple[str, pa.Array, Callable[[int], str]]]:
    if partitions is None:
        return
    if limits.whole_records:
        numbers = partitions.cast(pa.int64())
        wrong = pc.or_(pc.less(numbers, 0), pc.greater(numbers, MAX_PARTITION))
        yield "partition", wrong, lambda row: f"{partitions[row]}, expected 0 to {MAX_PARTITION}"
    else:
        yield "partition", partitions.is_valid(), lambda _: "given, for which the outbox has no column"


def _well_named(topics: pa.Array) -> pa.Array:
    named = pc.and_not(pc.match_substring_regex(topics, TOPIC_PATTERN), pc.starts_with(topics, KAFKAS_OWN))
    return pc.fill_null(named, fill_value=False)


def _with_empty(names: pa.Array) -> pa.Array:
    """Which lists of names have an empty one."""
    return lists_with(names, pc.equal(names.flatten(), ""))


def _too_long(texts: pa.Array, limit: int) -> Callable[[int], str]:
    return lambda row: f"{len(texts[row].as_py())} characters, of which {limit} are allowed"
