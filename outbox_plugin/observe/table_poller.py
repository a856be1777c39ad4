"""Queries the state of an outbox every few seconds, on its own connection and thread.

So a scrape does not wait for Postgres, and a standby harvester knows whether it can reach Postgres. The relay's own
events would not do: a relay that has halted does not report the rows that it fails to send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg

from outbox_plugin.adapters.row_reader import parked_values
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.errors import StoreUnavailable
from outbox_plugin.log_tenant import of_same_tenant
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.connection import IS_STANDBY, connect, errors_as_unavailable
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.harvester")

THREAD_NAME = "outbox-table-poller"
POLL_SECONDS = 5.0
COUNTED = 10_000  # The largest number of rows, and of dead letters, that is counted. This takes milliseconds.
STATEMENT_MILLISECONDS = 1_000  # A query that takes longer is cancelled, and its figures are left out.

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rows of a shard that wait only for the harvester: how many, and how long the oldest has waited."""

    rows: int
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True)
class TableSize:
    """What Postgres says of the table: its dead rows, by its statistics, and its bytes, with indexes."""

    dead_rows: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class TableState:
    """The state of an outbox. `waiting` has the shards with rows to send. None is what took too long to find out."""

    shards: int
    paused: frozenset[int]
    parked_keys: int
    dead_letters: int | None
    waiting: Mapping[int, Waiting] | None
    size: TableSize | None


class TablePoller:
    """Reads the table every `POLL_SECONDS` until it is closed."""

    def __init__(self, settings: Settings, found: Callable[[TableState], None], failed: Callable[[str], None]) -> None:
        """Start polling.

        Args:
            settings: name the outbox.
            found: called with each state that was read.
            failed: called with the reason, in one line, if Postgres does not answer, or with an error.
        """
        self._settings = settings
        self._found = found
        self._failed = failed
        self._closed = threading.Event()
        self._thread = threading.Thread(target=of_same_tenant(self._poll), name=THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait until the thread has ended. It finishes a read that is under way."""
        self._closed.set()
        self._thread.join()

    def _poll(self) -> None:
        has_failed = False  # Since the last read that succeeded.
        while not self._closed.is_set():
            try:
                with (
                    errors_as_unavailable(),
                    closing(connect(self._settings, purpose="outbox harvester (metrics)")) as connection,
                ):
                    table = with_schema(connection, self._settings.table)
                    while not self._closed.is_set():
                        self._found(read_table(connection, self._settings.table, table))
                        has_failed = False
                        self._closed.wait(POLL_SECONDS)
            except Exception as error:  # Go on after any error: the next read may succeed.
                reason = one_line(error)
                if not has_failed:
                    logger.warning("the outbox cannot be queried for metrics and /readyz: %s", reason)
                has_failed = True
                self._failed(reason)
            self._closed.wait(POLL_SECONDS)


def read_table(connection: Connection, table: str, place: str) -> TableState:
    """Read the state of an outbox.

    Args:
        connection: to its database.
        table: its name, as in the settings.
        place: its name with its schema.

    Raises:
        psycopg.Error: whatever Postgres raises.
        StoreUnavailable: the server is a standby, on which no harvester could take over.
    """

    def ask(noun: str, name: str, *, conditions: str | None = None, **values: object) -> list[tuple[Any, ...]]:
        part = statement("window", conditions, place) if conditions else psycopg.sql.SQL("")
        query = statement(noun, name, place, conditions=part)
        with connection.transaction():  # So that its settings do not stay in a pooler's session.
            connection.execute(statement("window", "walk_by_id", place))
            connection.execute(statement("window", "limit_duration", place), {"milliseconds": STATEMENT_MILLISECONDS})
            return connection.execute(query, {"table": table, **values}).fetchall()

    [(_, is_standby)] = ask("window", "snapshot")
    if is_standby:
        raise StoreUnavailable(IS_STANDBY)
    [(_, shards, _, paused, paused_shards)] = ask("control", "layout") or [(0, 1, (), False, ())]
    parked = [OrderingKey(topic, key, keyless) for topic, key, *_, keyless in ask("control", "parked")]
    letters, waiting, size = None, None, None
    try:
        [(letters,)] = ask("control", "count_some_dead_letters", counted=COUNTED)
        condition = "not_parked" if parked else None
        values = {"counted": COUNTED, "shards": shards, **parked_values(parked)}
        earliest = ask("window", "to_be_sent", conditions=condition, **values)
        waiting = {shard: Waiting(rows, seconds) for shard, rows, seconds in earliest}
        [(dead_rows, total_bytes)] = ask("identity", "space_taken")
        size = TableSize(int(dead_rows), int(total_bytes)) if total_bytes is not None else None
    except psycopg.errors.QueryCanceled:
        pass
    all_paused = frozenset(range(shards) if paused else paused_shards)
    return TableState(shards, all_paused, len(parked), letters, waiting, size)
