"""From a user's columns to the outbox's, as Spark expressions: the JVM does the work."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from outbox_plugin.errors import UserError

_PLAIN = (StringType, BinaryType, BooleanType, NumericType, DateType, TimestampType, TimestampNTZType, NullType)

_PAIR = ["key", "value"]


class EventColumnWrong(UserError):
    """A DataFrame of events lacks a column, or has one of a wrong type."""


class BusinessColumnWrong(UserError):
    """A DataFrame of business rows has a column of a type that is not copied."""


def business_columns(rows: DataFrame) -> DataFrame:
    """The columns of `rows`, in a form that Postgres reads from CSV as what they are.

    Raises:
        BusinessColumnWrong: a column is of a compound type.
    """

    def copied(name: str, kind: DataType) -> Column:
        column = f.col(f"`{name.replace('`', '``')}`")
        if isinstance(kind, BinaryType):  # Its bytes as they are would be read as bytea's escape format.
            return f.concat(f.lit("\\x"), f.hex(column)).alias(name)
        return column.cast("string").alias(name) if isinstance(kind, NullType) else column

    for field in rows.schema.fields:
        if not isinstance(field.dataType, _PLAIN):
            kind = field.dataType.simpleString()
            raise BusinessColumnWrong(f"the column {field.name!r} is {kind}; make it a string first, as with to_json")
    return rows.select(*(copied(field.name, field.dataType) for field in rows.schema.fields))


def outbox_columns(events: DataFrame, topic: str | None) -> DataFrame:
    """The five columns of the outbox that `events` fills.

    Args:
        events: `key`, `value` (string, binary, or a struct that becomes JSON; null is a tombstone), optionally
            `headers` (map of string to string, or an array of `struct<key, value>` as Spark's Kafka sink takes it), and
            `topic` unless that is given.
        topic: the topic of all events; None when they name their own.

    Raises:
        EventColumnWrong: a column is missing or of a wrong type.
    """
    fields = {field.name: field.dataType for field in events.schema.fields}
    for name in ("key", "value", *(() if topic else ("topic",))):
        if name not in fields:
            raise EventColumnWrong(f"the events lack the column {name!r}; they have {', '.join(fields)}")
    value = f.col("value")
    if isinstance(fields["value"], StructType | MapType):
        value = f.to_json(value, {"ignoreNullFields": "false"})
    elif isinstance(fields["value"], BinaryType):
        value = f.decode(value, "UTF-8")
    elif not isinstance(fields["value"], StringType):
        raise EventColumnWrong(f"the column 'value' is {fields['value'].simpleString()}; expected string or a struct")
    names, texts = _headers(fields.get("headers"))
    return events.select(
        (f.lit(topic) if topic else f.col("topic")).alias("kafka_topic"),
        f.col("key").cast("string").alias("kafka_key"),
        value.alias("kafka_value"),
        _array_literal(names).alias("kafka_header_keys"),
        _array_literal(texts).alias("kafka_header_values"),
    )


def _headers(kind: DataType | None) -> tuple[Column, Column]:
    """The headers' names and their texts, as two arrays."""
    none = f.array().cast("array<string>")
    headers = f.col("headers")
    if kind is None:
        return none, none
    if isinstance(kind, MapType):
        names, texts = f.map_keys(headers), f.map_values(headers)
    elif isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType) and kind.elementType.names == _PAIR:
        names, texts = headers["key"], headers["value"]
    else:
        said = kind.simpleString()
        raise EventColumnWrong(
            f"the column 'headers' is {said}; expected a map of strings, or array<struct<key,value>>"
        )
    return tuple(f.coalesce(each.cast("array<string>"), none) for each in (names, texts))  # type: ignore[return-value]


def _array_literal(texts: Column) -> Column:
    """An array of strings as Postgres writes one: `{"a","b"}`."""

    def quoted(text: Column) -> Column:
        escaped = f.regexp_replace(f.coalesce(text, f.lit("")), r'([\\"])', r"\\$1")
        return f.concat(f.lit('"'), escaped, f.lit('"'))

    return f.concat(f.lit("{"), f.array_join(f.transform(texts, quoted), ","), f.lit("}"))
