"""What is wrong with a row that cannot become a Kafka record, whoever wrote it.

Postgres lets a TEXT[] hold nested arrays, NULLs and empty texts, and an ALTER TABLE can let NULL into any column. A row
like that is a bad row: this file says in one sentence why. `fault_of` is called for a row only if a quick check of
the batch has found that something is wrong in it, because each row of the hot path may take only a few microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import eq
from typing import Any

from outbox_plugin.core.row import Misfit, OutboxRow, TooLarge, WholeRecord, column
from outbox_plugin.core.whole_record import WHOLE_RECORD_HEADER

_VALUES = frozenset({str, bytes, type(None), WholeRecord})


def faults_of(rows: Sequence[OutboxRow]) -> dict[int, str]:
    """Why rows of a batch cannot become records, by their ids. It is fast if no row is bad."""
    if _are_plain(rows):
        return {}
    return {row.id: fault for row in rows if (fault := fault_of(row)) is not None}


def _are_plain(rows: Sequence[OutboxRow]) -> bool:
    """Whether `fault_of` would find nothing. It is fast, because it checks one column of all rows at a time."""
    if not set(map(type, column(rows, "value"))) <= _VALUES or set(map(type, column(rows, "key"))) - {str}:
        return False
    try:
        same = all(map(eq, map(len, column(rows, "header_keys")), map(len, column(rows, "header_values"))))
    except TypeError:  # NULL in place of an array.
        return False
    return same and None not in column(rows, "create_time") and header_names_are_plain(rows)


def header_names_are_plain(rows: Sequence[OutboxRow]) -> bool:
    """Whether all header names of `rows` are texts that are not empty. It is fast, because it checks many at once."""
    try:
        names = set(chain.from_iterable(column(rows, "header_keys")))
    except TypeError:  # NULL in place of an array, or an array inside an array.
        return False
    return all(isinstance(name, str) and name for name in names)


def fault_of(row: OutboxRow) -> str | None:
    """Why `row` cannot become a record; None if it can."""
    return (
        _column_fault(row)
        or _array_fault("keys", row.header_keys)
        or _array_fault("values", row.header_values)
        or _header_fault(row.header_keys, row.header_values, is_whole=isinstance(row.value, WholeRecord))
    )


def _column_fault(row: OutboxRow) -> str | None:
    columns: dict[str, Any] = {"kafka_topic": row.topic, "kafka_key": row.key}
    for name, text in {**columns, "create_time": row.create_time}.items():
        if text is None:
            return f"{name} is NULL"
    for name, text in columns.items():
        if not isinstance(text, str):
            return f"{name} is a {type(text).__name__}; expected a text"
    value: Any = row.value
    if isinstance(value, TooLarge):
        return f"{value.what} {value.size:,} bytes; larger than the client's message.max.bytes of {value.limit:,}"
    if isinstance(value, Misfit):
        return value.reason
    if not isinstance(value, str | bytes | WholeRecord | None):
        return f"kafka_value is a {type(value).__name__}; expected a text, bytes or NULL"
    return None


def _array_fault(what: str, array: Any) -> str | None:
    if array is None:
        return f"the array of header {what} is NULL; expected an array, which may be empty"
    if not isinstance(array, list):
        return f"the header {what} are a {type(array).__name__}; expected an array of texts"
    if any(isinstance(each, list) for each in array):
        return f"the header {what} are an array of arrays; expected an array of texts"
    return None


def _header_fault(names: Sequence[Any], texts: Sequence[Any], *, is_whole: bool) -> str | None:
    if len(names) != len(texts):
        if names and names[0] == WHOLE_RECORD_HEADER and not texts:
            return "it is a whole record, and the table lacks the columns for it: run `outbox migrate`"
        return f"{len(names)} header keys, but {len(texts)} header values"
    for place, (name, text) in enumerate(zip(names, texts, strict=True), start=1):
        if name is None or name == "":
            return f"the key of header {place} is {'empty' if name == '' else 'NULL'}; a header needs a name"
        if not isinstance(name, str):
            return f"the key of header {place} is a {type(name).__name__}; expected a text"
        if not isinstance(text, str | None) and not (is_whole and isinstance(text, bytes)):
            return f"the value of header {place} is a {type(text).__name__}; expected a text or NULL"
    return None
