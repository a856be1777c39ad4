"""Reads rows of the outbox: few rows in the way that is fastest for few, many in the way that is fastest for many."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import psycopg
from psycopg import generators
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import TextBinaryLoader

from outbox_plugin.adapters.postgres_session import PostgresSession
from outbox_plugin.core.intervals import MANY_ROWS
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.core.row import Rows
from outbox_plugin.schema.connection import pipeline

_ANY_OTHER_TYPE = 0  # To psycopg, the id of the types that it does not know.


class RowReader:
    """Runs the reads of a session. The transaction of each is first configured for reading."""

    def __init__(self, session: PostgresSession) -> None:
        """Nothing is read yet."""
        self._session = session
        self._connection = session.reader
        self._expects_many = False
        self._last_few: tuple[tuple[bytes, ...], dict[str, object]] | None = None
        self._message = b""  # Of the last read of few rows; the next is often the same.
        self._simple = psycopg.ClientCursor(self._connection)
        self._binary = psycopg.Cursor(self._connection)
        for cursor in (self._simple, self._binary):
            cursor.adapters.register_loader("timestamptz", Int8BinaryLoader)  # As it comes: see OutboxRow.
            cursor.adapters.register_loader(_ANY_OTHER_TYPE, TextBinaryLoader)  # A text of an extension, as citext.

    def conditions(self, request: ReadRequest) -> tuple[tuple[str, ...], dict[str, object]]:
        """The conditions of a read, as names and values: the term's rows, in the span of ids, and not parked."""
        names = ["of_this_outbox", *(["of_slice"] if self._session.layout.shards > 1 else [])]
        values: dict[str, object] = {"limit": request.limit, "above": request.ids.above}
        if request.ids.up_to is not None:
            names.append("up_to")
            values["until"] = request.ids.up_to
        if request.ids.open_writers is not None:
            names.append("above_open_writers")
            values["open_up_to"], open_writers = request.ids.open_writers
            values["open_writers"] = list(open_writers)
        if request.excluded_keys:
            names.append("not_parked")
            values |= parked_values(request.excluded_keys)
        return tuple(names), values

    def read(self, few: tuple[bytes, ...], many: tuple[bytes, ...], values: dict[str, object]) -> Rows:
        """The rows of a read. It runs `few`, or `many` if the last read found many rows.

        Either is one round trip and one implicit transaction. Its settings end with it, also behind a pooler.

        Args:
            few: statements for one message of the simple protocol. The last one returns the rows.
            many: statements for a pipeline of the extended protocol. The last one returns the rows.
            values: for both, beside those of the term.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        rows = self._read_many(many, values) if self._expects_many else self._read_few(few, values)
        self._expects_many = len(rows) >= MANY_ROWS
        return rows

    def _read_few(self, statements: tuple[bytes, ...], values: dict[str, object]) -> Rows:
        """One message of the simple protocol, without a cursor.

        Nearly every read of a leader that is not busy finds nothing. For such a read, a cursor takes this process twice
        as long, and a pipeline four times as long.
        """
        few = statements, values
        if few != self._last_few:
            configured = self._session.statement("window", "configure_read"), *statements
            self._last_few, self._message = few, self._session.bind(self._simple, b";".join(configured), values)
        self._connection.pgconn.send_query(self._message)
        *_, result = self._connection.wait(generators.execute(self._connection.pgconn))
        if result.status != ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result, self._connection.info.encoding)
        if not result.ntuples:
            return Rows(())
        transformer = Transformer(self._simple)
        transformer.set_pgresult(result)
        return Rows(transformer.load_rows(0, result.ntuples, tuple))

    def _read_many(self, statements: tuple[bytes, ...], values: dict[str, object]) -> Rows:
        """A pipeline of the extended protocol, whose rows come in binary without a cursor.

        Postgres sends each row as soon as it has found it. With a cursor, it would keep the rows until it has them all.
        """
        *first, query = statements
        with pipeline(self._connection):
            for each in (self._session.statement("window", "configure_read"), *first):
                self._connection.execute(self._session.bind(self._simple, each, values))
            self._binary.execute(self._session.bind(self._simple, query, values), binary=True)
        return Rows(self._binary.fetchall())

    def ids(self, name: str, conditions: tuple[str, ...], values: dict[str, object]) -> list[int]:
        """The ids of rows, as `read` would find the rows.

        Args:
            name: a statement of `window.sql` that returns ids.
            conditions: names of conditions, as `conditions` returns them.
            values: of all conditions.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        query = self._session.bind(self._simple, self._session.statement("window", name, conditions), values)
        with pipeline(self._connection):
            self._connection.execute(self._session.statement("window", "configure_read"))
            found = self._connection.execute(query)
        return [id_ for (id_,) in found.fetchall()]

    def details(self, name: str, ids: Sequence[int]) -> dict[int, tuple[Any, ...]]:
        """The columns that the statement `name` returns for these rows, by id; rows that are gone are left out.

        Like every read, it runs in one transaction with `configure_read`, which fails on a standby: rows that a
        standby lacks would seem to be gone.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        with pipeline(self._connection):
            self._connection.execute(self._session.statement("window", "configure_read"))
            self._binary.execute(*self._session.query("window", name, ids=ids), binary=True)
        return {id_: tuple(columns) for id_, *columns in self._binary.fetchall()}


def parked_values(parked: Collection[OrderingKey]) -> dict[str, object]:
    """The values of the condition `not_parked`."""
    with_key = [key for key in parked if key.key is not None]
    return {
        "parked_topics": [key.topic for key in parked if key.whole_topic],
        "parked_keyless": [key.topic for key in parked if key.keyless],
        "parked_key_topics": [key.topic for key in with_key],
        "parked_keys": [key.key for key in with_key],
    }
