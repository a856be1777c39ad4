"""Reads which ordering keys a backlog has: from the summaries that its writers left, and otherwise from its rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import psycopg

from outbox_plugin.adapters.postgres_session import PostgresSession
from outbox_plugin.adapters.row_reader import RowReader
from outbox_plugin.core.id_watermark import BEGINNING, IdRange
from outbox_plugin.core.key_summary import HASH_BYTES
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.errors import StoreUnavailable
from outbox_plugin.schema.connection import pipeline

HASH_FORM = 1  # Of the statement `key_hash`, and of the function `outbox_summarise_keys`.
KEYS_PER_PART = 50_000  # About 50 ms of work. Between two parts, a summary can be given up.
_BYTES_PER_PART = 500_000 * HASH_BYTES


class BacklogKeys:
    """Reads on a connection of its own, beside all other statements of the session."""

    def __init__(self, session: PostgresSession, rows: RowReader, connection: psycopg.Connection[Any]) -> None:
        """Nothing is read yet.

        Args:
            session: composes statements, and has the term's values.
            rows: has the conditions of the term's reads.
            connection: to read on.
        """
        self._session = session
        self._rows = rows
        self._connection = connection

    def hashes_up_to(self, bound: int, rows: int) -> Generator[bytes]:
        """Hashes of the keys of all rows with ids up to `bound`, in parts; keys of other rows may be among them.

        Args:
            bound: the last id.
            rows: an upper bound of how many such rows there are. At most so many hashes of other keys are returned.

        Raises:
            StoreUnavailable: the outbox is no longer the one that the term began with.
            psycopg.Error: any other error of Postgres.
        """
        used: list[int] = []
        most_bytes = rows * HASH_BYTES
        for summary, size in self._summaries(bound):
            if size <= most_bytes and (yield from self._of_summary(summary, size)):
                used.append(summary)
                most_bytes -= size
        yield from self._of_rows(self._not_summarised(bound, used))

    def _summaries(self, bound: int) -> Sequence[tuple[int, int]]:
        """The id of each summary, and how many bytes it has. None where we may not read them."""
        try:
            return self._query("key_summaries", hash_form=HASH_FORM, bound=bound)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedTable):
            return []

    def _of_summary(self, summary: int, size: int) -> Generator[bytes, None, bool]:
        """The hashes of a summary. Returns whether it was there to the end."""
        for first in range(1, size + 1, _BYTES_PER_PART):
            found = self._query("summarised_hashes", summary=summary, first=first, bytes=_BYTES_PER_PART)
            if not found:
                return False
            yield found[0][0]
        return True

    def _not_summarised(self, bound: int, used: Sequence[int]) -> Sequence[tuple[int, int]]:
        """The ranges of ids up to `bound` that no summary has: the first id of each, and the one behind its last."""
        if not used:
            return [(BEGINNING + 1, bound + 1)]
        return self._query("not_summarised", above=BEGINNING, bound=bound, summaries=list(used))

    def _of_rows(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The hashes of all rows with ids in these ranges."""
        for wide in (each for each in ranges if _width(each) > KEYS_PER_PART):
            yield from self._of_wide_range(*wide)
        narrow = [each for each in ranges if _width(each) <= KEYS_PER_PART]
        ids_before = accumulate(map(_width, narrow), initial=0)
        for _, together in groupby(zip(ids_before, narrow, strict=False), lambda each: each[0] // KEYS_PER_PART):
            yield self._of_narrow_ranges([each for _, each in together])

    def _of_wide_range(self, first: int, behind: int) -> Iterator[bytes]:
        above: int | None = first - 1
        while above is not None:
            names, values = self._rows.conditions(ReadRequest(KEYS_PER_PART, IdRange(above, behind - 1)))
            above, hashes, is_this_outbox = self._read("key_hashes_up_to", names, values)
            yield _checked(hashes, is_this_outbox)

    def _of_narrow_ranges(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        names, values = self._rows.conditions(ReadRequest(KEYS_PER_PART))
        firsts, behinds = zip(*ranges, strict=True)
        values = {**values, "first": list(firsts), "behind": list(behinds)}
        return _checked(*self._read("key_hashes_between", names, values))

    def _read(self, name: str, conditions: tuple[str, ...], values: dict[str, object]) -> tuple[Any, ...]:
        """The only row of a statement that reads keys."""
        query = self._session.statement("window", name, conditions)
        [row] = self._run_configured(*self._session.with_values(query, values))
        return row

    def _query(self, name: str, **values: object) -> list[tuple[Any, ...]]:
        return self._run_configured(*self._session.query("window", name, **values))

    def _run_configured(self, query: bytes, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """The rows of a query that walks the primary key, without a time-out."""
        with pipeline(self._connection):
            self._connection.execute(self._session.statement("window", "configure_read"))
            found = self._connection.execute(query, values, binary=True)
        return found.fetchall()


def _width(ids: tuple[int, int]) -> int:
    first, behind = ids
    return behind - first


def _checked(hashes: bytes | None, is_this_outbox: bool) -> bytes:
    if not is_this_outbox:
        raise StoreUnavailable("Postgres: the outbox is no longer the one that the term began with")
    return hashes or b""
