"""Kept rows, emitted again."""

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
    """Emit again what was published in a span of time and kept (OUTBOX_RETENTION), in its order; returns how many.

    Each carries a header `outbox-replay` with the id that it had. They follow whatever waits in the outbox now.

    Raises:
        SchemaMissing: our tables are not there.
        ServerRefused: Postgres cannot be reached, or refuses.
    """
    with notifying_transaction(settings) as transaction:
        return transaction.run("history", "replay", topic=topic, key=key, since=since, until=until).rowcount
