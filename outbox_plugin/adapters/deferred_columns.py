"""Columns that a read of rows leaves out, and reads apart: large values and headers, and those of whole records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from outbox_plugin.adapters.row_reader import RowReader
from outbox_plugin.adapters.untranslatable_rows import details_or_misfits
from outbox_plugin.core.row import Misfit, OutboxRow, RecordLimit, TooLarge
from outbox_plugin.core.whole_record import RecordColumns, with_record


class DeferredColumns(NamedTuple):
    """Parts of rows, by their ids: the value, the two arrays of headers, topic and key, and a whole record's columns.

    A row that somebody has deleted since has none: without its value it would be a tombstone. A row that is too large
    for any record has only a `TooLarge`; one that Postgres cannot send has a `Misfit` alone.
    """

    parts: dict[int, tuple[Any, ...]]
    first_unread: int | None  # The first row that is larger, with those before it, than may be in memory together.

    def complete(self, row: OutboxRow, horizon: int) -> OutboxRow:
        """`row`, which is one of them, with its parts and the given horizon."""
        value, *more = self.parts[row.id]
        if isinstance(value, TooLarge | Misfit):
            return row._replace(value=value, header_keys=[], header_values=[], horizon=horizon)
        names, texts, _, _, *columns = more
        whole = row._replace(value=value, header_keys=names, header_values=texts, horizon=horizon)
        return with_record(whole, RecordColumns._make(columns))

    def with_present_key(self, row: OutboxRow) -> OutboxRow:
        """`row` with the topic and the key that belong to the parts, if somebody has changed them since it was read."""
        value, *more = self.parts[row.id]
        return row if isinstance(value, TooLarge | Misfit) else row._replace(topic=more[2], key=more[3])

    def is_of(self, row: OutboxRow) -> bool:
        """Whether the parts are of `row` as it was read. If its topic or key has changed, so may the rest have."""
        value, *more = self.parts[row.id]
        return isinstance(value, TooLarge | Misfit) or more[2:4] == [row.topic, row.key]


def read_deferred_columns(
    reader: RowReader, ids: Sequence[int], limit: RecordLimit, most_bytes: float
) -> DeferredColumns:
    """Read the columns that a read of the rows `ids` has left out.

    A value, or headers, that are larger than any record are never read: they may have hundreds of megabytes.

    Args:
        reader: of the term.
        ids: the rows.
        limit: how large a record may be.
        most_bytes: what all parts may have together; the first row may have more.

    Raises:
        psycopg.Error: whatever Postgres says.
    """
    parts: dict[int, tuple[Any, ...]] = {}
    wanted: list[int] = []
    first_unread, total = None, 0
    for id_, (value, headers) in reader.details("large_rows", ids).items():
        if (too_large := limit.too_large(value, headers)) is not None:
            parts[id_] = (too_large,)
            continue
        total += value + headers
        if wanted and total > most_bytes:
            first_unread = id_
            break
        wanted.append(id_)
    return DeferredColumns(parts | details_or_misfits(reader, "deferred_columns", wanted), first_unread)
