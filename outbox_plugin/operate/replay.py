"""Emits kept rows again."""

from __future__ import annotations

from datetime import datetime

from outbox_plugin.operate.operator_transaction import notifying_transaction
from outbox_plugin.settings import Settings


def replay(
    settings: Settings,
    *,
    topic: str | None = None,
    key: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> int:
    """Emit kept events (OUTBOX_RETENTION) again, in their order. Returns how many.

    Each gets a header `outbox-replay` with its former id. They follow all rows that wait in the outbox now.

    Args:
        settings: name the outbox.
        topic: only events of this topic.
        key: only events of this key.
        since: only events that were published at this time or later.
        until: only events that were published before this time.

    Raises:
        UserError: the outbox is a view that takes no rows.
        SchemaMissing: the outbox's tables are missing.
        ServerRefused: Postgres cannot be reached, or refuses.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, nobody knows whether it was done.
    """
    with notifying_transaction(settings) as transaction, transaction.emission():
        return transaction.run("history", "replay", topic=topic, key=key, since=since, until=until).rowcount
