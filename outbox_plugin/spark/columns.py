"""From a user's columns to the outbox's, as Spark expressions: the JVM does the work."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType, MapType, StringType, StructType

from outbox_plugin.errors import UserError


class EventColumnWrong(UserError):
    """A DataFrame of events lacks a column, or has one of a wrong type."""


def outbox_columns(events: DataFrame, topic: str | None) -> DataFrame:
    """The five columns of the outbox that `events` fills.

    Args:
        events: `key`, `value` (string, binary, or a struct that becomes JSON; null is a tombstone), optionally
            `headers` (map of string to string), and `topic` unless that is given.
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
    none = f.create_map().cast("map<string,string>")
    if not isinstance(fields.get("headers", MapType(StringType(), StringType())), MapType):
        raise EventColumnWrong(f"the column 'headers' is {fields['headers'].simpleString()}; expected a map of strings")
    headers = f.coalesce(f.col("headers").cast("map<string,string>"), none) if "headers" in fields else none
    return events.select(
        (f.lit(topic) if topic else f.col("topic")).alias("kafka_topic"),
        f.col("key").cast("string").alias("kafka_key"),
        value.alias("kafka_value"),
        _array_literal(f.map_keys(headers)).alias("kafka_header_keys"),
        _array_literal(f.map_values(headers)).alias("kafka_header_values"),
    )


def _array_literal(texts: Column) -> Column:
    """An array of strings as Postgres writes one: `{"a","b"}`."""

    def quoted(text: Column) -> Column:
        escaped = f.regexp_replace(f.coalesce(text, f.lit("")), r'([\\"])', r"\\$1")
        return f.concat(f.lit('"'), escaped, f.lit('"'))

    return f.concat(f.lit("{"), f.array_join(f.transform(texts, quoted), ","), f.lit("}"))
