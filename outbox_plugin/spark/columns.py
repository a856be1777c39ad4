"""Converts a user's columns to those of a staging table, batch by batch in Arrow. Their types are checked once, first.

The builder (`OutboxWrite`), the batch sink and the stream all use this module. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, IntegralType, NullType, StructType

from outbox_plugin.errors import UserError
from outbox_plugin.spark.column_types import (
    DECIMAL_ORDER,
    KEYS,
    PLAIN,
    TEXTS,
    are_bytes,
    are_headers,
    is_document,
    ordered_as,
)
from outbox_plugin.spark.headers import headers_of
from outbox_plugin.spark.json_text import json_text
from outbox_plugin.spark.row_problems import (
    RowProblem,
    TableLimits,
    Unstorable,
    event_shown,
    first_unstorable,
    row_problems,
    shown,
)
from outbox_plugin.spark.staged_events import staged_events
from outbox_plugin.spark.unstorable_text import decoded, decoded_document, is_text, without_nul
from outbox_plugin.spark.whole_records import WHOLE_COLUMNS, no_whole_records, whole_records

EVENT_COLUMNS = ("kafka_topic", "kafka_key", "kafka_value", "kafka_header_keys", "kafka_header_values")
EVENT_FIELDS = ("topic", "key", "value", "headers")  # Beside a business row, `partition` is a column of that.


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
    def may_be_whole(self) -> bool:
        """Business rows are no records."""
        return False

    @property
    def binary(self) -> bool:
        """Whether all columns can be copied in binary form: no, as a business table's columns may be of any type."""
        return False

    def convert(self, batch: pa.RecordBatch, limits: TableLimits) -> Converted:  # noqa: ARG002 Postgres judges these.
        """The business columns unchanged."""
        wrong = self.unstorable(batch)
        refused = None
        if wrong:
            first = self.names[0]
            of = f"the row with {first} {shown(decoded(self._column(batch, first)).values[wrong.row])}"
            refused = RowProblem(wrong.column, f"{wrong.problem}, of {of}")
        return Converted(self.copied(batch), {}, refused)

    def copied(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The columns as they are staged."""
        return [self._column(batch, name) for name in self.names]

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
    of_bytes: frozenset[str] = frozenset()  # Those of key, value and headers that hold bytes.
    has_partition: bool = False

    @property
    def may_be_whole(self) -> bool:
        """Whether some events may be whole records."""
        return self.has_partition or bool(self.of_bytes)

    @property
    def needed(self) -> list[str]:
        """The DataFrame's columns that are used."""
        own = ["key", "value", *(() if self.topic else ("topic",)), *(("headers",) if self.has_headers else ())]
        own += ["partition"] if self.has_partition else []
        return list(dict.fromkeys([*own, *(name for name, _ in self.order_by), *self.rows.names]))

    @property
    def typed(self) -> dict[str, str]:
        """Columns of the staging table, each with an SQL value that gives it its type."""
        texts = dict.fromkeys(EVENT_COLUMNS[:3], "''::text")
        lists = dict.fromkeys(EVENT_COLUMNS[3:], "ARRAY[]::text[]")
        order = dict(zip(self.order, (example for _, example in self.order_by), strict=True))
        whole = WHOLE_COLUMNS if self.may_be_whole else {}
        return {**texts, **lists, "outbox_problem": "''::text", **whole, **order}

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

    def convert(self, batch: pa.RecordBatch, limits: TableLimits) -> Converted:
        """The events of `batch`, and which of them the outbox or Kafka would refuse."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        events = self._events(columns, len(batch), limits)
        order = {name: columns[name] for name, _ in self.order_by}
        ordering_texts = {name: decoded(column) for name, column in order.items() if is_text(column.type)}
        order |= {name: each.values for name, each in ordering_texts.items()}
        bad = row_problems(
            pa.RecordBatch.from_arrays(events.texts, list(EVENT_COLUMNS)),
            {**events.undecodable, **{name: each.undecodable for name, each in ordering_texts.items()}},
            limits,
            {name: order[name] for name in ordering_texts},
            columns["partition"] if self.has_partition else None,
        )
        if bad:
            order = {name: without_nul(each) if name in ordering_texts else each for name, each in order.items()}
        staged = staged_events(events.texts, events.value, bad, events.altering)
        refused = None
        if wrong := self.rows.unstorable(batch):
            topics, keys, *_ = events.texts
            of = event_shown(topics[wrong.row], keys[wrong.row])
            refused = RowProblem(wrong.column, f"{wrong.problem}, of {of}")
        return Converted([*staged, *events.whole, *order.values(), *self.rows.copied(batch)], bad, refused)

    def _events(self, columns: Mapping[str, pa.Array], rows: int, limits: TableLimits) -> _Events:
        undecodable: dict[str, pa.Array] = {}

        def text(name: str) -> pa.Array:
            texts, undecodable[name] = decoded(columns[name])
            return texts

        topics = pa.repeat(self.topic, rows) if self.topic else text("topic")
        keys = text("key")
        value, documents = columns["value"], pa.types.is_nested(columns["value"].type)
        if documents:
            value, undecodable["value"] = decoded_document(value)
            value = json_text(value)
        values = value if documents else text("value")
        headers = headers_of(columns["headers"] if self.has_headers else None, rows)
        undecodable["headers"] = pc.or_(headers.wrong_names, headers.wrong_texts)
        # A value that is no document keeps its bytes.
        altering = {name: mask for name, mask in undecodable.items() if documents or name != "value"}
        texts = [topics, keys, values, headers.names, headers.texts]
        if not self.may_be_whole:
            return _Events(texts, value, undecodable, altering, [])
        if not limits.whole_records:
            if self.has_partition:
                altering["partition"] = columns["partition"].is_valid()
            return _Events(texts, value, undecodable, altering, no_whole_records(headers))
        own = {name: columns[name] for name in (*self.of_bytes, *(("partition",) if self.has_partition else ()))}
        whole = whole_records(own, keys, values, headers, undecodable)
        undecodable = {name: mask for name, mask in undecodable.items() if name not in self.of_bytes}
        undecodable["headers"] = headers.wrong_names if "headers" in self.of_bytes else altering["headers"]
        altering |= {name: mask for name, mask in whole.no_text.items() if name in ("key", "headers", "partition")}
        texts = [topics, whole.keys, whole.values, headers.names, whole.texts]
        return _Events(texts, value, undecodable, altering, whole.staged)


class _Events(NamedTuple):
    """The events of a batch.

    Attributes:
        texts: the columns `EVENT_COLUMNS`, with U+FFFD in place of bytes that are not UTF-8.
        value: the values in their original bytes, or as JSON if they are documents.
        undecodable: for each of the DataFrame's columns, which rows have such bytes, and so cannot be published.
        altering: for each of the DataFrame's columns, which rows would lose some of it as a dead letter.
        whole: the columns `WHOLE_COLUMNS`; none if no event may be a whole record.
    """

    texts: list[pa.Array]
    value: pa.Array
    undecodable: dict[str, pa.Array]
    altering: dict[str, pa.Array]
    whole: list[pa.Array]


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
            `topic` unless that is given, and optionally `headers` (map of string to string or binary, or an array of
            `struct<key, value>` as Spark's Kafka sink takes it) and `partition` (an integer; null: the key decides).
        topic: the topic of all events; None when they name their own.
        order_by: the columns that the events are sorted by.
        rows: the form of their business rows. With them, `partition` is a column of the business table.

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
    has_partition = rows is None and "partition" in fields
    if has_partition and not isinstance(fields["partition"], IntegralType | NullType):
        kind = fields["partition"].simpleString()
        raise EventColumnWrong(f"the column 'partition' is {kind}; expected an integer, the number of a partition")
    order: list[tuple[str, str]] = []
    for name in order_by:
        example = ordered_as(fields[name])
        if example is None:
            kind = fields[name].simpleString()
            raise EventColumnWrong(f"the column {name!r} is {kind}: events cannot be sorted by that")
        order.append((name, example))
    of_bytes = frozenset(name for name in ("key", "value", "headers") if name in fields and are_bytes(fields[name]))
    return EventForm(topic, "headers" in fields, tuple(order), rows or RowForm(()), of_bytes, has_partition)
