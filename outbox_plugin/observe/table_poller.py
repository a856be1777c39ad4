"""What Postgres says of an outbox every few seconds, asked on a connection and a thread of its own.

So a scrape asks the database nothing, and a harvester that only stands by knows whether it could reach it. The relay's
own word is not enough: a relay that has halted would not tell of the rows that it does not send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg

from outbox_plugin.adapters.row_reader import parked_values
from outbox_plugin.core.ordering_keys import OrderingKey
from outbox_plugin.errors import StoreUnavailable
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import IS_STANDBY, connect, one_line, reported
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import in_full
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.harvester")

POLL_SECONDS = 5.0
COUNTED = 10_000  # Rows, and dead letters: more are not counted, so that a read costs milliseconds.
STATEMENT_MILLISECONDS = 1_000  # An answer that takes longer is done without.

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rows of a shard that wait for nothing but the harvester: how many, and for how long the oldest has."""

    rows: int
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True)
class TableState:
    """What was read; `waiting` has the shards with rows to send, and is None where the answer took too long."""

    shards: int
    paused: frozenset[int]
    parked_keys: int
    dead_letters: int | None
    waiting: Mapping[int, Waiting] | None


class TablePoller:
    """Reads the table every `POLL_SECONDS` until it is closed."""

    def __init__(self, settings: Settings, found: Callable[[TableState], None], failed: Callable[[str], None]) -> None:
        """Begin at once.

        Args:
            settings: which outbox.
            found: is called with what was read.
            failed: is called with the reason, in one line, where Postgres has not answered as it should.
        """
        self._settings = settings
        self._found = found
        self._failed = failed
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="outbox-table-looks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; returns when the thread has ended, after the read that is under way."""
        self._closed.set()
        self._thread.join()

    def _poll(self) -> None:
        has_failed = False  # Since the last read that succeeded.
        while not self._closed.is_set():
            try:
                with reported(), closing(connect(self._settings, purpose="outbox harvester (looks)")) as connection:
                    table = in_full(connection, self._settings.table)
                    while not self._closed.is_set():
                        self._found(read_table(connection, self._settings.table, table))
                        has_failed = False
                        self._closed.wait(POLL_SECONDS)
            except Exception as error:  # Whatever it is, the next read may succeed.
                reason = one_line(error)
                if not has_failed:
                    logger.warning("the outbox cannot be looked at for metrics and /readyz: %s", reason)
                has_failed = True
                self._failed(reason)
            self._closed.wait(POLL_SECONDS)


def read_table(connection: Connection, table: str, place: str) -> TableState:
    """What Postgres says of the outbox `table`, whose name with its schema is `place`.

    Raises:
        psycopg.Error: whatever Postgres says.
        StoreUnavailable: it is a standby, on which nobody could take over.
    """

    def ask(noun: str, name: str, *, conditions: str | None = None, **values: object) -> list[tuple[Any, ...]]:
        part = statement("window", conditions, place) if conditions else psycopg.sql.SQL("")
        query = statement(noun, name, place, conditions=part)
        with connection.transaction():  # What is set for it must not stay with a pooler's session.
            connection.execute(statement("window", "walk_by_id", place))
            connection.execute(statement("window", "give_up_after", place), {"milliseconds": STATEMENT_MILLISECONDS})
            return connection.execute(query, {"table": table, **values}).fetchall()

    [(_, is_standby)] = ask("window", "snapshot")
    if is_standby:
        raise StoreUnavailable(IS_STANDBY)
    [(_, shards, _, paused, paused_shards)] = ask("control", "layout") or [(0, 1, (), False, ())]
    parked = [OrderingKey(topic, key, keyless) for topic, key, *_, keyless in ask("control", "parked")]
    letters, waiting = None, None
    try:
        [(letters,)] = ask("control", "count_some_dead_letters", counted=COUNTED)
        condition = "not_parked" if parked else None
        values = {"counted": COUNTED, "shards": shards, **parked_values(parked)}
        earliest = ask("window", "to_be_sent", conditions=condition, **values)
        waiting = {shard: Waiting(rows, seconds) for shard, rows, seconds in earliest}
    except psycopg.errors.QueryCanceled:
        pass
    return TableState(shards, frozenset(range(shards) if paused else paused_shards), len(parked), letters, waiting)
