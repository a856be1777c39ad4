"""The size of a row's record as Kafka stores it, to compare rows that a topic may find too large.

https://kafka.apache.org/documentation/#record describes the format.
"""

from __future__ import annotations

from outbox_plugin.core.row import OutboxRow, WholeRecord

_ATTRIBUTES, _TIMESTAMP_DELTA, _OFFSET_DELTA = 1, 1, 1  # The deltas of the only record of a batch are 0.
_NULL_BYTES = 1  # A length of -1, and no content.


def record_body_bytes(row: OutboxRow) -> int:
    """Bytes of the record of `row` without its length field, where it is the only record of its batch.

    The row has no fault. The larger of two rows is larger for Kafka, too, unless records are compressed.
    """
    value = row.value
    key, text = (value.key, value.value) if isinstance(value, WholeRecord) else (row.key, value)
    headers = zip(row.header_keys, row.header_values, strict=True)
    return (
        _ATTRIBUTES
        + _TIMESTAMP_DELTA
        + _OFFSET_DELTA
        + _field_bytes(key)
        + _field_bytes(text)
        + _varint_bytes(len(row.header_keys))
        + sum(_field_bytes(name) + _field_bytes(content) for name, content in headers)
    )


def _field_bytes(content: object) -> int:
    """The size of a key, a value, or a part of a header: its length, and its bytes."""
    if isinstance(content, str):
        content = content.encode()
    return _varint_bytes(len(content)) + len(content) if isinstance(content, bytes) else _NULL_BYTES


def _varint_bytes(number: int) -> int:
    """The size of a number that is not negative, in zigzag encoding with seven bits in a byte."""
    return max(1, -(-(2 * number).bit_length() // 7))
