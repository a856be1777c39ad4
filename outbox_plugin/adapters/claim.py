"""What a harvester asks of the outbox before it touches anything: is it there, is it ours, how is it split."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from psycopg import sql

from outbox_plugin.core.progress import Identity
from outbox_plugin.core.shards import Layout
from outbox_plugin.errors import ForeignOutbox, SchemaMissing
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings


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
            return connection.execute(*_query("identity", name, settings, **values)).fetchall()

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


def claim_layout(settings: Settings) -> Layout:
    """Let the outbox have as many shards as the settings say, and returns its layout; who starts last, decides.

    Raises:
        psycopg.Error: whatever Postgres says.
    """
    with closing(connect(settings, purpose="outbox harvester (start)")) as connection:
        connection.execute(*_query("control", "claim_layout", settings, shards=settings.shards))
    return read_layout(settings)


def read_layout(settings: Settings) -> Layout:
    """How many shards the outbox has.

    Raises:
        SchemaMissing: the outbox is not known.
        psycopg.Error: whatever else Postgres says.
    """
    with closing(connect(settings, purpose="outbox harvester (start)")) as connection:
        found = connection.execute(*_query("control", "layout", settings)).fetchone()
    if found is None:
        raise SchemaMissing(f"there is no outbox table {settings.table!r}; run `outbox migrate` first")
    number, shards, unsettled, *_ = found
    return Layout(number, shards, tuple(unsettled))


def ids_drawn_ahead(settings: Settings) -> int:
    """How many ids a writer's session draws from the sequence at a time; 1 keeps ids in the order of transactions."""
    with closing(connect(settings, purpose="outbox harvester (start)")) as connection:
        found = connection.execute(*_query("identity", "sequence_cache", settings)).fetchone()
    return int(found[0]) if found else 1


def _query(noun: str, name: str, settings: Settings, **values: object) -> tuple[sql.Composed, dict[str, object]]:
    return statement(noun, name, settings.table), {"table": settings.table, **values}
