"""A shard's term in Postgres: two connections, the statements that run on them, and what holds for all of them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, Protocol

import psycopg
from psycopg import sql

from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.core.id_watermark import SequenceState, with_epoch
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.postgres_ports import Control
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.errors import ForeignOutbox, LayoutChanged, StoreUnavailable
from outbox_plugin.schema.connection import IS_STANDBY, connect, errors_as_unavailable, pipeline
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.whole_records import takes_whole_records, whole_record_parts
from outbox_plugin.settings import Settings

Query = tuple[bytes, dict[str, object]]


class Run(Protocol):
    """Runs the statement `name` of `queries/<noun>.sql` in a transaction that is open."""

    def __call__(self, noun: str, name: str, **values: object) -> psycopg.Cursor[tuple[Any, ...]]:
        """Raises psycopg.Error for whatever Postgres says."""
        ...


class PostgresSession:
    """Two connections, so that rows are read while others are deleted: `reader` and `purger`.

    Each statement is a transaction of its own, and none is prepared: a transaction-mode pooler may stand between.
    One thread uses the reader. Several may use the purger, through the methods here alone.
    """

    def __init__(self, settings: Settings, shard: int, layout: Layout) -> None:
        """Connect, and see who the outbox is.

        Args:
            settings: which outbox.
            shard: one of those of `layout`.
            layout: that the term begins with.

        Raises:
            StoreUnavailable: Postgres does not let us.
            LayoutChanged: the outbox has another layout, or another group harvests it, by now.
            SchemaMissing: the outbox is not known, or its table is not as it must be.
        """
        self.settings = settings
        self.slice = Slice(shard, layout.shards)
        self._composed: dict[tuple[str, tuple[str, ...]], bytes] = {}
        with errors_as_unavailable(), ExitStack() as opened:
            self.reader = opened.enter_context(closing(connect(settings, purpose="outbox harvester", own_name=True)))
            registration = HarvesterRegistration(settings, self.reader)
            self._table = registration.table_with_schema
            self.identity = registration.check_outbox()
            try:
                registration.register_group()
            except ForeignOutbox as adopted:  # Ends this term alone. The next start checks again.
                raise LayoutChanged(str(adopted)) from None
            self.layout = registration.layout()
            if self.layout.number != layout.number:
                raise LayoutChanged(f"the outbox has {self.layout.shards} shards now")
            self._values: dict[str, object] = {
                "table": settings.table,
                "incarnation": self.identity.incarnation,
                "layout": layout.number,
                "shards": layout.shards,
                "shard": shard,
            }
            self.signer = registration.signer()
            self.has_wake_up_trigger = registration.has_wake_up_trigger(shard)
            self._notice_hidden_rows = (
                sql.SQL("true")  # Then Postgres would refuse every statement.
                if registration.has_row_security()
                else statement("window", "notice_hidden_rows", self._table)
            )
            self._takes_whole_records = takes_whole_records(self.reader, self._table)
            self._whole_record_parts = whole_record_parts(self._table, has_columns=self._takes_whole_records)
            self.purger = opened.enter_context(
                closing(connect(settings, purpose="outbox harvester (purge)", own_name=True))
            )
            self._purges = psycopg.ClientCursor(self.purger)
            self._purger_lock = threading.Lock()
            self._opened = opened.pop_all()

    def query(self, noun: str, name: str, **values: object) -> Query:
        """A statement with the values that it needs.

        Args:
            noun: names the file, `queries/<noun>.sql`.
            name: of the statement in it.
            values: of the statement's parameters, besides those of the term.
        """
        return self.with_values(self.statement(noun, name), values)

    def with_values(self, query: bytes, values: dict[str, object]) -> Query:
        """`query` with the values of the term, and `values`."""
        return query, {**self._values, **values}

    def statement(self, noun: str, name: str, conditions: tuple[str, ...] = ()) -> bytes:
        """A statement. Each is composed once, because that takes long.

        Args:
            noun: names the file, `queries/<noun>.sql`.
            name: of the statement in it.
            conditions: names the conditions of a read that are put in.
        """
        key = f"{noun}.{name}", conditions
        if key not in self._composed:
            parts = [statement("window", condition, self._table) for condition in conditions]
            composed = statement(
                noun,
                name,
                self._table,
                conditions=sql.SQL("\n  ").join(parts),
                header_bytes=sql.SQL("({})").format(statement("window", "header_bytes", self._table)),
                key_hash=sql.SQL("({})").format(statement("window", "key_hash", self._table)),
                keep_gone=statement("history", "keep_gone", self._table, **self._whole_record_parts),
                notice_hidden_rows=self._notice_hidden_rows,
                **self._whole_record_parts,
            )
            self._composed[key] = composed.as_bytes(self.reader)
        return self._composed[key]

    def bind(self, cursor: psycopg.ClientCursor[Any], statement: bytes, values: dict[str, object]) -> bytes:
        """A statement whose parameters are replaced by literals.

        Args:
            cursor: knows how Postgres quotes literals.
            statement: one statement, or several.
            values: of the parameters, besides those of the term.
        """
        return _bound(cursor, *self.with_values(statement, values))

    def control(self) -> Control:
        """What operators command, and where the ids stand. Reads on the reader.

        Raises:
            StoreUnavailable: the outbox is no longer the one that the term began with, or Postgres is away.
            LayoutChanged: it has another number of shards now.
        """
        with errors_as_unavailable(), pipeline(self.reader):
            state = self.reader.execute(*self.query("control", "state"))
            writers = self.reader.execute(*self.query("control", "writers"))
            parked = self.reader.execute(*self.query("control", "parked"))
            found, holders = state.fetchone(), writers.fetchall()
            parked_keys = frozenset(OrderingKey(topic, key, keyless) for topic, key, *_, keyless in parked.fetchall())
        if found is None or not found[0]:
            raise StoreUnavailable(f"Postgres: the table {self.settings.table!r} was dropped, truncated or recreated")
        _, is_standby, layout, paused, last_id = found
        if is_standby:
            raise StoreUnavailable(IS_STANDBY)
        if layout != self.layout.number:
            raise LayoutChanged("the outbox has another number of shards now")
        return Control(paused, parked_keys, _sequence_state(last_id, holders))

    def snapshot(self) -> str:
        """Which transactions have ended. Reads on the reader.

        Raises:
            StoreUnavailable: Postgres is away, or a standby.
        """
        with errors_as_unavailable():
            [(snapshot, is_standby)] = self.reader.execute(self.statement("window", "snapshot")).fetchall()
        if is_standby:
            raise StoreUnavailable(IS_STANDBY)
        return str(snapshot)

    def groups(self) -> set[str]:
        """The groups of all outboxes in this database, as far as we may read of them.

        Raises:
            StoreUnavailable: Postgres is away.
        """
        with self._purger_lock, errors_as_unavailable():
            tables = self.purger.execute(self.statement("identity", "identity_tables")).fetchall()
            queries = [
                sql.SQL("SELECT harvest_group FROM {} WHERE harvest_group IS NOT NULL").format(sql.Identifier(*table))
                for table in tables
            ]
            return {group for query in queries for (group,) in self.purger.execute(query).fetchall()}

    def run(self, noun: str, name: str, **values: object) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run one statement on the purger, in a transaction of its own.

        Args:
            noun: names the file, `queries/<noun>.sql`.
            name: of the statement in it.
            values: of the statement's parameters, besides those of the term.

        Raises:
            StoreUnavailable: Postgres is away, or refuses.
        """
        with self._purger_lock, errors_as_unavailable():
            return self.purger.execute(*self.query(noun, name, **values))

    @contextmanager
    def durable_transaction(self) -> Iterator[Run]:
        """A transaction on the purger; durable, whatever the session's default.

        Another thread must not delete inside it: its deletion would be undone where this one is.

        Raises:
            StoreUnavailable: Postgres is away, or refuses.
        """

        def run(noun: str, name: str, **values: object) -> psycopg.Cursor[tuple[Any, ...]]:
            return self.purger.execute(*self.query(noun, name, **values))

        with self._purger_lock, errors_as_unavailable(), self.purger.transaction():
            run("window", "durable_with_idle_time_out")
            yield run

    def delete(self, setup: Sequence[str], queries: Sequence[Query]) -> list[int]:
        """Run `queries`, which delete or count rows, in one round trip and one transaction. Returns each one's count.

        Args:
            setup: names the statements of `window.sql` that run first: `durable` or `not_durable` for the commit,
                `configure_read` for the planner and the time-outs.
            queries: what deletes, or counts.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        statements = [self.statement("window", name) for name in setup]
        message = b";".join((*statements, *(_bound(self._purges, *query) for query in queries)))
        with self._purger_lock:
            self._purges.execute(message)
            counts = [self._purges.rowcount]  # `rowcount` is that of the current result.
            while self._purges.nextset():
                counts.append(self._purges.rowcount)
            return counts[len(setup) :]

    def check_columns(self, run: Run) -> None:
        """Check that the table does not take whole records yet, where the term does not know their columns.

        To such a term, the row of a whole record looks like a bad row.

        Args:
            run: a transaction of the purger's.

        Raises:
            StoreUnavailable: somebody has migrated the outbox meanwhile.
        """
        if not self._takes_whole_records and run("identity", "takes_whole_records").fetchall() == [(True,)]:
            raise StoreUnavailable(f"Postgres: the table {self.settings.table!r} takes whole records now")

    def cannot_delete(self, rows: int) -> StoreUnavailable:
        """The error to raise if a deletion raised none, and left rows that Kafka has; `rows` is their number."""
        return StoreUnavailable(
            f"Postgres: {rows} published row(s) of {self.settings.table!r} cannot be deleted: a trigger or a policy "
            "of the table keeps them. Nothing more is published until they can be"
        )

    def close(self) -> None:
        """Give the connections back. Safe to call twice."""
        with suppress(psycopg.Error):
            self._opened.close()


def _sequence_state(last_id: int, holders: Collection[tuple[str, list[int] | None, int]]) -> SequenceState:
    """The state of the sequence. `holders` are the rows of the statement `writers`.

    A transaction may have several ids, those of its subtransactions included. The least is its own.
    """
    transaction_ids = {
        writer: min(with_epoch(each, next_id) for each in found) for writer, found, next_id in holders if found
    }
    return SequenceState(last_id, frozenset(writer for writer, *_ in holders), transaction_ids)


def _bound(cursor: psycopg.ClientCursor[Any], query: bytes, values: dict[str, object]) -> bytes:
    """`query` with `values` as literals, for a message of the simple protocol."""
    return cursor.mogrify(query, values).encode(cursor.connection.info.encoding)
