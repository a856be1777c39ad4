"""Pause and resume. The state is kept in the database, so that every harvester obeys it, also after a restart."""

from __future__ import annotations

from outbox_plugin.errors import InvalidSetting, SchemaMissing
from outbox_plugin.operate.operator_transaction import notifying_transaction
from outbox_plugin.settings import Settings


def pause(settings: Settings, shard: int | None = None) -> None:
    """Publish no more rows of the outbox, or of one shard, until `resume`. Rows that were read before are published.

    Raises:
        InvalidSetting: there is no such shard.
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, nobody knows whether it was done.
    """
    _switch(settings, "pause", shard)


def resume(settings: Settings, shard: int | None = None) -> None:
    """Publish again, from where `pause` stopped: one shard, or by default all.

    Raises:
        InvalidSetting: there is no such shard, or the outbox is paused as a whole.
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, nobody knows whether it was done.
    """
    _switch(settings, "resume", shard)


def _switch(settings: Settings, name: str, shard: int | None) -> None:
    with notifying_transaction(settings) as transaction:
        found = transaction.run("control", name, shard=shard).fetchone()
        if found is None:
            raise SchemaMissing(f"there is no outbox table {settings.table!r}; run `outbox migrate` first")
        shards, is_paused = found
        if shard is not None and not 0 <= shard < shards:
            raise InvalidSetting(f"there is no shard {shard}: {settings.table} has {shards}, counted from 0")
        if name == "resume" and is_paused:  # Only a shard was to be resumed.
            raise InvalidSetting(
                f"{settings.table} is paused as a whole: resume it without a shard, then pause the other shards"
            )
