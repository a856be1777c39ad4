"""The outbox in Postgres, on psycopg."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.numeric import Int8BinaryLoader

from outbox_plugin.core.ids import IdRanges
from outbox_plugin.core.progress import Identity, Publication
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import ForeignOutbox, SchemaMissing, StoreUnavailable
from outbox_plugin.schema.connection import connect, reported
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings


class PostgresStore:
    """`OutboxStore` on two connections, so that a window is read while another is purged.

    Every statement is a transaction of its own, and none is prepared: a transaction-mode pooler may stand between.
    """

    def __init__(self, settings: Settings, *, adopt: bool = False) -> None:
        """Connect, and see who the outbox is.

        Raises:
            StoreUnavailable: Postgres does not let us.
            SchemaMissing, ForeignOutbox: see `claim_outbox`.
        """
        self._settings = settings
        self._steer = statement("window", "steer", settings.table)
        self._read_window = statement("window", "read_window", settings.table)
        self._purge = statement("window", "purge", settings.table)
        with reported(), ExitStack() as opened:
            self._identity = claim_outbox(settings, adopt=adopt)
            self._reader = opened.enter_context(closing(connect(settings, purpose="outbox harvester")))
            self._purger = opened.enter_context(closing(connect(settings, purpose="outbox harvester (purge)")))
            self._opened = opened.pop_all()
        self._windows = self._reader.cursor(binary=True)
        self._windows.adapters.register_loader("timestamptz", Int8BinaryLoader)  # As it comes: see OutboxRow.

    @property
    def identity(self) -> Identity:
        """See `OutboxStore.identity`."""
        return self._identity

    def check_identity(self) -> None:
        """See `OutboxStore.check_identity`."""
        with reported():
            found = self._reader.execute(*_identity_query("identity", self._settings)).fetchone()
        if found is None or not found[2] or found[0] != self._identity.incarnation:
            raise StoreUnavailable(f"Postgres: the table {self._settings.table!r} was dropped or made anew")

    def read(self, in_flight: IdRanges, limit: int) -> Sequence[OutboxRow]:
        """See `OutboxStore.read`."""
        values = {
            "in_flight": in_flight.text(),
            "limit": limit,
            "table": self._settings.table,
            "incarnation": self._identity.incarnation,
        }
        # One round trip, and one implicit transaction: what `steer` sets ends with it, also behind a pooler.
        with reported(), self._reader.pipeline():
            self._reader.execute(self._steer)
            return list(map(OutboxRow._make, self._windows.execute(self._read_window, values).fetchall()))

    def purge(self, publication: Publication) -> int:
        """See `OutboxStore.purge`."""
        values = {
            "ids": publication.ids.text(),
            "horizon": publication.horizon,
            "created_until": publication.created_until,
        }
        with reported():
            return self._purger.execute(self._purge, values).rowcount

    def close(self) -> None:
        """See `OutboxStore.close`."""
        with suppress(psycopg.Error):
            self._opened.close()


def claim_outbox(settings: Settings, *, adopt: bool = False) -> Identity:
    """Check that the outbox is there and ours, and remember our group in the database; returns who the outbox is.

    With `adopt`, our group replaces the one that the database remembers.

    Raises:
        SchemaMissing: the table, one of its columns, or our own tables are missing.
        ForeignOutbox: another group harvests this outbox; fencing would not stop it.
        psycopg.Error: whatever else Postgres says.
    """
    with closing(connect(settings, purpose="outbox harvester (start)")) as connection:

        def fetch(name: str, **values: object) -> list[tuple[Any, ...]]:
            return connection.execute(*_identity_query(name, settings, **values)).fetchall()

        found = fetch("identity")
        if not found or found[0][2] is None:
            raise SchemaMissing(f"there is no outbox table {settings.table!r}; run `outbox migrate` first")
        incarnation, place, is_same_table, remembered = found[0]
        if not is_same_table:
            raise SchemaMissing(
                f"the table {settings.table!r} was dropped and made anew, or restored; run `outbox migrate` first"
            )
        if missing := [column for (column,) in fetch("columns")]:
            raise SchemaMissing(f"the table {settings.table!r} lacks the column(s) {', '.join(missing)}")
        [(remembered,)] = fetch("claim_group", group=settings.group, adopt=adopt)
        if remembered != settings.group:
            raise ForeignOutbox(
                f"the group {remembered!r} harvests the outbox {settings.table!r}, not {settings.group!r}. Set "
                "OUTBOX_GROUP to it; or, once none of its harvesters runs, start once with `outbox harvest --adopt`"
            )
    return Identity(incarnation, place)


def ids_drawn_ahead(settings: Settings) -> int:
    """How many ids a writer's session draws from the sequence at a time; 1 keeps ids in the order of transactions."""
    with closing(connect(settings, purpose="outbox harvester (start)")) as connection:
        found = connection.execute(*_identity_query("sequence_cache", settings)).fetchone()
    return int(found[0]) if found else 1


def _identity_query(name: str, settings: Settings, **values: object) -> tuple[sql.Composed, dict[str, object]]:
    return statement("identity", name, settings.table), {"table": settings.table, **values}
