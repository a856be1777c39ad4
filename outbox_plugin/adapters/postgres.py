"""The outbox in Postgres, as both deliveries see it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import psycopg
from psycopg import generators, sql
from psycopg.adapt import Transformer
from psycopg.pq import ExecStatus
from psycopg.types.numeric import Int8BinaryLoader

from outbox_plugin.adapters.registration import Registration
from outbox_plugin.adapters.sql_refusals import concerns_all_rows, is_refusal, storable
from outbox_plugin.core.floor import Drawn
from outbox_plugin.core.lanes import BadRow, Lane
from outbox_plugin.core.pace import MANY_ROWS
from outbox_plugin.core.ports import Control, Wanted
from outbox_plugin.core.progress import Identity
from outbox_plugin.core.row import Rows
from outbox_plugin.core.shards import Layout
from outbox_plugin.errors import Fenced, ForeignOutbox, LayoutChanged, StoreUnavailable
from outbox_plugin.schema.connection import IS_STANDBY, connect, reported
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

Query = tuple[bytes, dict[str, object]]


class PostgresOutbox:
    """`Outbox` on two connections, so that rows are read while others are deleted.

    Each statement is a transaction of its own, and none is prepared: a transaction-mode pooler may stand between.
    """

    def __init__(self, settings: Settings, shard: int, layout: Layout) -> None:
        """Connect, and see who the outbox is. `shard` is one of those of `layout`.

        Raises:
            StoreUnavailable: Postgres does not let us.
            LayoutChanged: the outbox has another layout, or another group harvests it, by now.
            SchemaMissing: the outbox is not known, or its table is not as it must be.
        """
        self._settings = settings
        self._composed: dict[tuple[str, tuple[str, ...]], bytes] = {}
        with reported(), ExitStack() as opened:
            self._reader = opened.enter_context(closing(connect(settings, purpose="outbox harvester", own_name=True)))
            registration = Registration(settings, self._reader)
            self._table = registration.in_full
            try:
                self._identity, self._layout = registration.outbox(), registration.layout()
            except ForeignOutbox as adopted:  # For this term alone; whoever begins again asks whether it is for good.
                raise LayoutChanged(str(adopted)) from None
            if self._layout.number != layout.number:
                raise LayoutChanged(f"the outbox has {self._layout.shards} shards now")
            self._values: dict[str, object] = {
                "table": settings.table,
                "incarnation": self._identity.incarnation,
                "layout": layout.number,
                "shards": layout.shards,
                "shard": shard,
            }
            self.wakes_up = registration.wakes_up(shard)
            self._purger = opened.enter_context(
                closing(connect(settings, purpose="outbox harvester (purge)", own_name=True))
            )
            self._purges = psycopg.ClientCursor(self._purger)
            self._purger_lock = threading.Lock()
            self._opened = opened.pop_all()
        self._look: tuple[tuple[bytes, ...], dict[str, object]] | None = None
        self._message = b""  # Of the last look; the next is often the same.
        self._expects_many = False
        self._looks = psycopg.ClientCursor(self._reader)
        self._reads = psycopg.Cursor(self._reader)
        for cursor in (self._looks, self._reads):
            cursor.adapters.register_loader("timestamptz", Int8BinaryLoader)  # As it comes: see OutboxRow.

    @property
    def identity(self) -> Identity:
        """See `Outbox.identity`."""
        return self._identity

    @property
    def layout(self) -> Layout:
        """See `OutboxStore.layout`."""
        return self._layout

    def control(self) -> Control:
        """See `Outbox.control`."""
        with reported(), self._reader.pipeline():
            orders = self._reader.execute(*self._query("control", "orders"))
            writers = self._reader.execute(*self._query("control", "writers"))
            parked = self._reader.execute(*self._query("control", "parked"))
            found, holders = orders.fetchone(), frozenset(writer for (writer,) in writers.fetchall())
            lanes = frozenset(Lane(topic, key, keyless) for topic, key, *_, keyless in parked.fetchall())
        if found is None or not found[0]:
            raise StoreUnavailable(f"Postgres: the table {self._settings.table!r} was dropped, truncated or made anew")
        _, is_standby, layout, paused, last_id = found
        if is_standby:
            raise StoreUnavailable(IS_STANDBY)
        if layout != self._layout.number:
            raise LayoutChanged("the outbox has another number of shards now")
        return Control(paused, lanes, Drawn(last_id, holders))

    def snapshot(self) -> str:
        """See `Outbox.snapshot`."""
        with reported():
            [(snapshot, is_standby)] = self._reader.execute(self._statement("window", "snapshot")).fetchall()
        if is_standby:
            raise StoreUnavailable(IS_STANDBY)
        return str(snapshot)

    def lead(self, leader_id: str) -> None:
        """See `Outbox.lead`."""
        self._values["leader_id"] = leader_id
        with self._purging():
            self._execute("lead")

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """See `Outbox.park`."""
        return self._put_aside("park", bad)

    def bury(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """See `Outbox.bury`."""
        return self._put_aside("bury", bad)

    def _put_aside(self, name: str, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Run the statement `name` for bad rows; returns those for which the database refuses it, with what it says.

        Halves are tried where all together are refused, so that one row which the database refuses costs no other.
        """
        values: dict[str, object] = {
            "ids": [each.row.id for each in bad],
            "whole_topics": [each.lane.whole_topic for each in bad],
            "reasons": [storable(each.refusal.reason) for each in bad],
        }
        kept: list[BadRow] = []
        try:
            with self._leading():
                if self._execute(name, **values).rowcount < len(bad) and name == "bury":
                    there = {id_ for (id_,) in self._execute("there", ids=values["ids"]).fetchall()}
                    kept = [each for each in bad if each.row.id in there]
        except StoreUnavailable as error:
            if not is_refusal(error.__cause__):
                raise
            if len(bad) > 1 and not concerns_all_rows(error.__cause__):
                half = len(bad) // 2
                return [*self._put_aside(name, bad[:half]), *self._put_aside(name, bad[half:])]
            done = "to park it" if name == "park" else "to make it a dead letter"
            return [each.because(f"the database refuses {done}: {error}") for each in bad]
        return [each.because("the table keeps it: a trigger or a policy prevents its deletion") for each in kept]

    def groups(self) -> set[str]:
        """The groups of all outboxes in this database, as far as we may read of them.

        Raises:
            StoreUnavailable: Postgres does not say.
        """
        with self._purger_lock, reported():
            found = self._purger.execute(self._statement("identity", "identity_tables")).fetchall()
            queries = [
                sql.SQL("SELECT harvest_group FROM {} WHERE harvest_group IS NOT NULL").format(sql.Identifier(*each))
                for each in found
            ]
            return {group for query in queries for (group,) in self._purger.execute(query).fetchall()}

    @contextmanager
    def _purging(self) -> Iterator[None]:
        """A transaction on the connection that deletes; durable, whatever the session's default.

        Another thread must not delete inside it: its deletion would be undone where this one is.
        """
        with self._purger_lock, reported(), self._purger.transaction():
            self._purger.execute(self._statement("window", "durable"))
            self._purger.execute(self._statement("window", "not_idle_for_long"))
            yield

    @contextmanager
    def _leading(self) -> Iterator[None]:
        """Such a transaction, which is committed only if nobody else leads.

        Asked last: what it did to the table keeps that from being truncated since.
        """
        with self._purging():
            yield
            if not self._execute("leads").rowcount:
                raise Fenced("Postgres: another harvester leads the shard, or the table is no longer the same")

    def _execute(self, name: str, **values: object) -> psycopg.Cursor[tuple[Any, ...]]:
        return self._purger.execute(*self._query("control", name, **values))

    def _query(self, noun: str, name: str, **values: object) -> Query:
        return self._statement(noun, name), {**self._values, **values}

    def _statement(self, noun: str, name: str, conditions: tuple[str, ...] = ()) -> bytes:
        """A statement, with the named `conditions` of a read put in; each is composed once, for that takes long."""
        key = f"{noun}.{name}", conditions
        if key not in self._composed:
            parts = [statement("window", condition, self._table) for condition in conditions]
            composed = statement(
                noun,
                name,
                self._table,
                conditions=sql.SQL("\n  ").join(parts),
                header_bytes=sql.SQL("({})").format(statement("window", "header_bytes", self._table)),
            )
            self._composed[key] = composed.as_bytes(self._reader)
        return self._composed[key]

    def _conditions(self, wanted: Wanted) -> tuple[tuple[str, ...], dict[str, object]]:
        """Which rows are this term's to read, in a span and not parked: names of conditions, and all their values."""
        names = ["of_this_outbox", *(["of_slice"] if self._layout.shards > 1 else [])]
        values: dict[str, object] = {"limit": wanted.limit, "floor": wanted.span.floor}
        if wanted.span.until is not None:
            names.append("up_to")
            values["until"] = wanted.span.until
        if wanted.parked:
            names.append("not_parked")
            values |= parked_lanes(wanted.parked)
        return tuple(names), values

    def _rows_of(self, few: tuple[bytes, ...], many: tuple[bytes, ...], values: dict[str, object]) -> Rows:
        """The rows that the last statement of `few` returns, or that of `many` while they come in masses.

        In either case the planner is steered, and all is one round trip and one implicit transaction: what is set for
        it ends with it, also behind a pooler.

        Raises:
            psycopg.Error: whatever Postgres says.
        """
        rows = self._many_rows_of(many, values) if self._expects_many else self._few_rows_of(few, values)
        self._expects_many = len(rows) >= MANY_ROWS
        return rows

    def _few_rows_of(self, statements: tuple[bytes, ...], values: dict[str, object]) -> Rows:
        """One message of the simple protocol, without a cursor.

        Nearly every look of a leader that is not busy finds nothing: a cursor takes this process twice as long for
        that, a pipeline four times.
        """
        look = statements, values
        if look != self._look:
            message = b";".join((self._statement("window", "steer"), *statements))
            self._look, self._message = look, bound(self._looks, message, {**self._values, **values})
        self._reader.pgconn.send_query(self._message)
        *_, found = self._reader.wait(generators.execute(self._reader.pgconn))
        if found.status != ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(found, self._reader.info.encoding)
        if not found.ntuples:
            return Rows(())
        transformer = Transformer(self._looks)
        transformer.set_pgresult(found)
        return Rows(transformer.load_rows(0, found.ntuples, tuple))

    def _many_rows_of(self, statements: tuple[bytes, ...], values: dict[str, object]) -> Rows:
        """A pipeline of the extended protocol: its rows come in binary without a cursor.

        So Postgres sends each when it has found it, where it would keep a cursor's rows until it has them all.
        """
        *first, query = statements
        with self._reader.pipeline():
            for each in (self._statement("window", "steer"), *first):
                self._reader.execute(bound(self._looks, each, {**self._values, **values}))
            self._reads.execute(bound(self._looks, query, {**self._values, **values}), binary=True)
        return Rows(self._reads.fetchall())

    def _of_rows(self, name: str, ids: Sequence[int]) -> dict[int, tuple[Any, ...]]:
        """What the statement `name` says of each of these rows; of a row that has vanished, nothing.

        In one transaction with `steer`, as every read: a standby would say of rows that it lacks that they vanished.
        """
        with self._reader.pipeline():
            self._reader.execute(self._statement("window", "steer"))
            found = self._reader.execute(*self._query("window", name, ids=ids), binary=True)
        return {id_: tuple(said) for id_, *said in found.fetchall()}

    def _deleted(self, first: Sequence[str], queries: Sequence[Query]) -> list[int]:
        """How many rows each of `queries` deletes, with one round trip and one commit.

        `first` names the statements that set the transaction up: that the commit is `durable` or `hasty`, and `steer`.
        """
        deletions = [bound(self._purges, *query) for query in queries]
        message = b";".join((*(self._statement("window", each) for each in first), *deletions))
        with self._purger_lock:
            self._purges.execute(message)
            counts = [self._purges.rowcount]  # Of the current result: one cursor goes through them all.
            while self._purges.nextset():
                counts.append(self._purges.rowcount)
            return counts[len(first) :]

    def _cannot_delete(self, rows: int) -> StoreUnavailable:
        """What to say of `rows` that Kafka has, and that a deletion has left without an error."""
        return StoreUnavailable(
            f"Postgres: {rows} published row(s) of {self._settings.table!r} cannot be deleted: a trigger or a policy "
            "of the table keeps them. Nothing more is published until they can be"
        )

    def close(self) -> None:
        """See `Outbox.close`."""
        with suppress(psycopg.Error):
            self._opened.close()


def parked_lanes(lanes: Collection[Lane]) -> dict[str, object]:
    """The values of the condition `not_parked`."""
    keys = [lane for lane in lanes if lane.key is not None]
    return {
        "parked_topics": [lane.topic for lane in lanes if lane.whole_topic],
        "parked_keyless": [lane.topic for lane in lanes if lane.keyless],
        "parked_key_topics": [lane.topic for lane in keys],
        "parked_keys": [lane.key for lane in keys],
    }


def bound(cursor: psycopg.ClientCursor[Any], query: bytes, values: dict[str, object]) -> bytes:
    """`query` with `values` put in as literals, to be part of a message of the simple protocol."""
    return cursor.mogrify(query, values).encode(cursor.connection.info.encoding)
