"""Rows with a text that Postgres cannot send, because its bytes have no form in UTF-8.

In a database whose encoding is not UTF-8, a text may have such bytes; under `SQL_ASCII`, any text may. Postgres then
fails the whole statement that reads the row, and names no row. So the rows are asked for in smaller and smaller groups,
until one fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from outbox_plugin.adapters.row_reader import RowReader
from outbox_plugin.core.row import Misfit
from outbox_plugin.printable import one_line

UNTRANSLATABLE = (psycopg.errors.CharacterNotInRepertoire, psycopg.errors.UntranslatableCharacter)


def details_or_misfits(reader: RowReader, name: str, ids: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    """`RowReader.details`; for a row that Postgres cannot send, a `Misfit` and nothing else.

    Args:
        reader: reads the rows.
        name: the statement.
        ids: of the rows.

    Raises:
        psycopg.Error: whatever else Postgres says.
    """
    try:
        return reader.details(name, ids) if ids else {}
    except UNTRANSLATABLE as error:
        if len(ids) == 1:
            return {ids[0]: (Misfit(f"it has a text that cannot be written in UTF-8: {one_line(error)}"),)}
        middle = len(ids) // 2
        return details_or_misfits(reader, name, ids[:middle]) | details_or_misfits(reader, name, ids[middle:])
