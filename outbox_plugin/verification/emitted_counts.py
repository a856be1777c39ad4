"""Asks Postgres how many events jobs have emitted, so that a verifier knows how many a topic must hold."""

from __future__ import annotations

from outbox_plugin.schema.connection import connect, errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings


def emitted_counts(settings: Settings, jobs: list[str]) -> dict[str, int]:
    """How many events each job, or streaming query, has emitted. Jobs that the database does not know are left out.

    Args:
        settings: name the database and the outbox.
        jobs: the ids of the jobs, or of the streaming queries.

    Raises:
        ServerRefused, SchemaMissing: Postgres cannot be reached or refuses, or the tables are missing.
    """
    with errors_as_refusals(settings), connect(settings, purpose="outbox verify") as connection:
        outbox = with_schema(connection, settings.table)
        return dict(connection.execute(statement("staging", "emitted", outbox), {"jobs": jobs}).fetchall())
