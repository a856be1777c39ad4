"""How many events the jobs of an outbox have emitted, by which what is missing from a topic is known."""

from __future__ import annotations

from outbox_plugin.schema.connection import connect, reported_as_refusal
from outbox_plugin.schema.place import in_full
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings


def emitted_counts(settings: Settings, jobs: list[str]) -> dict[str, int]:
    """How many events each job, or each streaming query, has emitted, as far as the database knows.

    Raises:
        ServerRefused, SchemaMissing: Postgres does not let us look.
    """
    with reported_as_refusal(settings), connect(settings, purpose="outbox verify") as connection:
        outbox = in_full(connection, settings.table)
        return dict(connection.execute(statement("staging", "emitted", outbox), {"jobs": jobs}).fetchall())
