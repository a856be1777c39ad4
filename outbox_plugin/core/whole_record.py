"""A whole record: a record with bytes that are not a text, with a partition of its own, or with a timestamp of its own.

goharvest's columns cannot hold such a record, so it has columns that are NULL in other rows. Migration 0071 says in
which form. Bytes that are a text which goharvest's columns can hold are kept there, and the row is like any other.

`kafka_key` of such a row is its *ordering key*: the text by which the row is ordered, parked and given to a shard. It
is the key itself where that is a text, so that a key has the same order in whichever form it was emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, NamedTuple

from outbox_plugin.core.row import POSTGRES_EPOCH_MICROS, Misfit, OutboxRow, WholeRecord

WHOLE_RECORD_HEADER = "outbox-record"  # The first name in `kafka_header_keys` of a whole record. It has no value.
MAX_HEX_BYTES = 48  # With so many, the ordering key has at most 100 characters.
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INFINITE = {2**63 - 1, -(2**63)}
_LATEST_MILLIS = 253_402_300_799_999  # The year 9999 ends.


class RecordColumns(NamedTuple):
    """The columns of a row that hold a whole record; `timestamp` in microseconds since 2000, as `create_time`."""

    key: bytes | None
    value: bytes | None
    header_values: Sequence[bytes | None] | None
    partition: int | None
    timestamp: int | None


def text_of(body: bytes) -> str | None:
    """`body` as a text that Postgres can hold; None if there is none."""
    try:
        return None if b"\0" in body else body.decode()
    except UnicodeDecodeError:
        return None


def ordering_key(key: bytes, max_characters: int) -> str:
    """The text by which rows with this key are ordered. Equal keys have equal texts, and other keys have others."""
    text = text_of(key)
    if text is not None and len(text) <= max_characters:
        return text
    return f"hex:{key.hex()}" if len(key) <= MAX_HEX_BYTES else f"sha256:{sha256(key).hexdigest()}"


def milliseconds(timestamp: datetime) -> int:
    """A timestamp as Kafka has it: whole milliseconds since 1970."""
    return (timestamp - _EPOCH) // timedelta(milliseconds=1)


def as_time(timestamp: int) -> str:
    """A timestamp of Kafka's as ISO 8601, for messages."""
    return (_EPOCH + timedelta(milliseconds=timestamp)).isoformat(timespec="milliseconds")


def with_record(row: OutboxRow, columns: RecordColumns) -> OutboxRow:
    """`row` with the whole record that its `columns` hold.

    Header values that are texts become `str`, as in other rows.
    """
    if columns == _NO_RECORD:
        return row
    fault = _fault(row, columns)
    if fault is not None:
        return row._replace(value=Misfit(fault), header_keys=[], header_values=[])
    value: Any = row.value if columns.value is None else columns.value
    timestamp = None if columns.timestamp is None else (columns.timestamp + POSTGRES_EPOCH_MICROS) // 1000
    record = WholeRecord(row.key if columns.key is None else columns.key, value, columns.partition, timestamp)
    bodies: list[Any] = [body if body is None else _text_or_bytes(body) for body in columns.header_values or ()]
    return row._replace(value=record, header_keys=row.header_keys[1:], header_values=bodies)


_NO_RECORD = RecordColumns(None, None, None, None, None)


def _text_or_bytes(body: bytes) -> str | bytes:
    text = text_of(body)
    return body if text is None else text


def _fault(row: OutboxRow, columns: RecordColumns) -> str | None:
    """Why the columns hold no record; None if they hold one."""
    names: Any = row.header_keys
    if not isinstance(names, list) or not names or names[0] != WHOLE_RECORD_HEADER or columns.header_values is None:
        return (
            f"it has a whole record's columns, but kafka_header_keys does not begin with {WHOLE_RECORD_HEADER!r}, or "
            "kafka_header_bytes is NULL; write such rows by emit or outbox_emit_record"
        )
    if row.header_values:
        return "it is a whole record, so kafka_header_values must be empty: kafka_header_bytes has the values"
    if any(isinstance(body, list) for body in columns.header_values):
        return "kafka_header_bytes is an array of arrays; expected an array of bytes"
    if len(names) - 1 != len(columns.header_values):
        return f"{len(names) - 1} header keys, but {len(columns.header_values)} header values"
    if columns.partition is not None and columns.partition < 0:
        return f"kafka_partition is {columns.partition}; expected 0 or more"
    if columns.timestamp is not None:
        millis = (columns.timestamp + POSTGRES_EPOCH_MICROS) // 1000
        if columns.timestamp in _INFINITE or not 0 < millis <= _LATEST_MILLIS:
            return "kafka_timestamp is not a time after 1970 began and before the year 10000"
    return None
