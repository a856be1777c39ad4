"""Converts a user's columns to those of a staging table, batch by batch in Arrow. Their types are checked once, first.

The builder (`OutboxWrite`), the batch sink and the stream all use this module. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, StructType

from outbox_plugin.errors import UserError
from outbox_plugin.spark.column_types import DECIMAL_ORDER, KEYS, PLAIN, TEXTS, are_headers, is_document, ordered_as
from outbox_plugin.spark.json_text import element_offsets, entries, json_text
from outbox_plugin.spark.rows import (
    RowProblem,
    SizeLimits,
    Unstorable,
    event_shown,
    first_unstorable,
    row_problems,
    shown,
)
from outbox_plugin.spark.staged_events import staged_events
from outbox_plugin.spark.unstorable_text import decoded, decoded_document, is_text, lists_with, without_nul

EVENT_COLUMNS = ("kafka_topic", "kafka_key", "kafka_value", "kafka_header_keys", "kafka_header_values")
EVENT_FIELDS = ("topic", "key", "value", "headers")


class EventColumnWrong(UserError):
    """A DataFrame of events lacks a column, or has one of a wrong type."""


class BusinessColumnWrong(UserError):
    """A DataFrame of business rows has a column that cannot be copied, or that the business table lacks."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted batch: its columns as they are staged, and its bad rows.

    Attributes:
        columns: the columns of the staging table.
        bad: the events that the outbox or Kafka would refuse, by their row numbers.
        refused: a business row that Postgres cannot store. Only events can become dead letters, so its job fails.
    """

    columns: list[pa.Array]
    bad: dict[int, RowProblem]
    refused: RowProblem | None = None


@dataclass(frozen=True)
class RowForm:
    """The columns of business rows: the DataFrame's without `left_out`, as text that Postgres reads from CSV."""

    names: tuple[str, ...]
    of_bytes: tuple[str, ...] = ()  # Those of `names` that are binary.
    left_out: tuple[str, ...] = ()  # The DataFrame's columns that belong to the event.

    @property
    def typed(self) -> dict[str, str]:
        """The staging table's columns that precede the business columns: none."""
        return {}

    @property
    def business(self) -> tuple[str, ...]:
        """The columns of the business table; the last columns of the staging table have their types."""
        return self.names

    @property
    def order(self) -> list[str]:
        """Business rows have no order."""
        return []

    @property
    def binary(self) -> bool:
        """Whether all columns can be copied in binary form: no, as a business table's columns may be of any type."""
        return False

    def convert(self, batch: pa.RecordBatch, limits: SizeLimits) -> Converted:  # noqa: ARG002 Postgres judges these.
        """The business columns unchanged, but for bytes, which become bytea's text."""
        wrong = self.unstorable(batch)
        refused = None
        if wrong:
            first = self.names[0]
            of = f"the row with {first} {shown(decoded(self._column(batch, first)).values[wrong.row])}"
            refused = RowProblem(wrong.column, f"{wrong.problem}, of {of}")
        return Converted(self.copied(batch), {}, refused)

    def copied(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The columns as COPY takes them."""
        return [_copied(self._column(batch, name)) for name in self.names]

    def unstorable(self, batch: pa.RecordBatch) -> Unstorable | None:
        """The first row with a text that Postgres cannot store."""
        texts = {name: column for name in self.names if is_text((column := self._column(batch, name)).type)}
        each = {name: decoded(column) for name, column in texts.items()}
        return first_unstorable(
            {name: column.values for name, column in each.items()},
            {name: column.undecodable for name, column in each.items()},
        )

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        return batch.column(batch.schema.get_field_index(name))


@dataclass(frozen=True)
class EventForm:
    """The columns of events: the outbox's, then those that the events are sorted by, then the business row's."""

    topic: str | None
    has_headers: bool
    order_by: tuple[tuple[str, str], ...]  # Column names, each with an SQL value of the type that Postgres sorts by.
    rows: RowForm

    @property
    def needed(self) -> list[str]:
        """The DataFrame's columns that are used."""
        own = ["key", "value", *(() if self.topic else ("topic",)), *(("headers",) if self.has_headers else ())]
        return list(dict.fromkeys([*own, *(name for name, _ in self.order_by), *self.rows.names]))

    @property
    def typed(self) -> dict[str, str]:
        """Columns of the staging table, each with an SQL value that gives it its type."""
        texts = dict.fromkeys(EVENT_COLUMNS[:3], "''::text")
        lists = dict.fromkeys(EVENT_COLUMNS[3:], "ARRAY[]::text[]")
        order = dict(zip(self.order, (example for _, example in self.order_by), strict=True))
        return {**texts, **lists, "outbox_problem": "''::text", **order}

    @property
    def business(self) -> tuple[str, ...]:
        """The columns of the business table; the last columns of the staging table have their types."""
        return self.rows.names

    @property
    def order(self) -> list[str]:
        """The staging table's columns that the events are ordered by."""
        return [f"outbox_order_{n}" for n in range(1, len(self.order_by) + 1)]

    @property
    def binary(self) -> bool:
        """Whether all columns can be copied in binary form. Decimals cannot: Postgres's form of them is complex."""
        return not self.rows.names and all(example != DECIMAL_ORDER for _, example in self.order_by)

    def convert(self, batch: pa.RecordBatch, limits: SizeLimits) -> Converted:
        """The events of `batch`, and which of them the outbox or Kafka would refuse."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        undecodable: dict[str, pa.Array] = {}

        def text(name: str) -> pa.Array:
            texts, undecodable[name] = decoded(columns[name])
            return texts

        topics = pa.repeat(self.topic, len(batch)) if self.topic else text("topic")
        keys = text("key")
        value, documents = columns["value"], pa.types.is_nested(columns["value"].type)
        if documents:
            value, undecodable["value"] = decoded_document(value)
            value = json_text(value)
        values = value if documents else text("value")
        names, texts, undecodable["headers"] = _headers(columns["headers"] if self.has_headers else None, len(batch))
        order = {name: text(name) if is_text(columns[name].type) else columns[name] for name, _ in self.order_by}
        ordering_texts = {name: column for name, column in order.items() if is_text(column.type)}
        events = [topics, keys, values, names, texts]
        bad = row_problems(pa.RecordBatch.from_arrays(events, list(EVENT_COLUMNS)), undecodable, limits, ordering_texts)
        if bad:
            order = {name: without_nul(each) if name in ordering_texts else each for name, each in order.items()}
        altering = {
            name: mask
            for name, mask in undecodable.items()
            if name in EVENT_FIELDS and (documents or name != "value")  # A value that is no document keeps its bytes.
        }
        staged = staged_events(events, value, bad, altering)
        refused = None
        if wrong := self.rows.unstorable(batch):
            of = event_shown(topics[wrong.row], keys[wrong.row])
            refused = RowProblem(wrong.column, f"{wrong.problem}, of {of}")
        return Converted([*staged, *order.values(), *self.rows.copied(batch)], bad, refused)


def row_form(schema: StructType, leave_out: Sequence[str] = ()) -> RowForm:
    """The form of business rows.

    Raises:
        BusinessColumnWrong: a column is of a compound type.
    """
    fields = [field for field in schema.fields if field.name not in leave_out]
    for field in fields:
        if not isinstance(field.dataType, PLAIN):
            kind = field.dataType.simpleString()
            raise BusinessColumnWrong(f"the column {field.name!r} is {kind}; make it a string first, as with to_json")
    return RowForm(
        tuple(field.name for field in fields),
        of_bytes=tuple(field.name for field in fields if isinstance(field.dataType, BinaryType)),
        left_out=tuple(field.name for field in schema.fields if field.name in leave_out),
    )


def event_form(
    schema: StructType, topic: str | None, order_by: Sequence[str] = (), rows: RowForm | None = None
) -> EventForm:
    """The form of events, whose columns `schema` names.

    Args:
        schema: has `key`, `value` (string, binary, or a struct, map or array that becomes JSON; null is a tombstone),
            optionally `headers` (map of string to string, or an array of `struct<key, value>` as Spark's Kafka sink
            takes it), and `topic` unless that is given.
        topic: the topic of all events; None when they name their own.
        order_by: the columns that the events are sorted by.
        rows: the form of their business rows.

    Raises:
        EventColumnWrong: a column is missing or of a wrong type.
    """
    fields = {field.name: field.dataType for field in schema.fields}
    for name in ("key", "value", *(() if topic else ("topic",)), *order_by):
        if name not in fields:
            raise EventColumnWrong(f"the events lack the column {name!r}; they have {', '.join(fields)}")
    for name in ("key", *(() if topic else ("topic",))):
        if not isinstance(fields[name], KEYS):
            raise EventColumnWrong(f"the column {name!r} is {fields[name].simpleString()}; expected a string")
    if not isinstance(fields["value"], TEXTS) and not is_document(fields["value"]):
        kind = fields["value"].simpleString()
        raise EventColumnWrong(
            f"the column 'value' is {kind}; expected string, binary or a struct (which becomes JSON)"
        )
    if "headers" in fields and not are_headers(fields["headers"]):
        kind = fields["headers"].simpleString()
        raise EventColumnWrong(
            f"the column 'headers' is {kind}; expected a map of strings, or array<struct<key,value>>"
        )
    order: list[tuple[str, str]] = []
    for name in order_by:
        example = ordered_as(fields[name])
        if example is None:
            kind = fields[name].simpleString()
            raise EventColumnWrong(f"the column {name!r} is {kind}: events cannot be sorted by that")
        order.append((name, example))
    return EventForm(topic, "headers" in fields, tuple(order), rows or RowForm(()))


def _copied(column: pa.Array) -> pa.Array:
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):  # As bytea's hexadecimal text.
        return pa.array([None if each is None else "\\x" + each.hex() for each in column.to_pylist()], pa.string())
    return column.cast(pa.string()) if pa.types.is_null(column.type) else column


def _headers(headers: pa.Array | None, rows: int) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Header names and texts, with empty text for null, and which rows have a header that is not UTF-8."""
    if headers is None:
        none = pa.ListArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), rows + 1), pa.array([], pa.string()))
        return none, none, pa.repeat(False, rows)
    pairs = entries(headers) if pa.types.is_map(headers.type) else headers
    halves = [decoded(half) for half in pairs.flatten().flatten()]
    offsets = element_offsets(pairs)
    names, texts = (pa.ListArray.from_arrays(offsets, pc.fill_null(half.values, "")) for half in halves)
    return names, texts, lists_with(pairs, pc.or_(*(half.undecodable for half in halves)))
