"""Removes staging tables whose jobs are gone."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.schema.statements import statement

_WAIT = sql.SQL("SET LOCAL lock_timeout = '1s'")


def drop_orphans(connection: psycopg.Connection[tuple[Any, ...]], table: str, job_id: str | None = None) -> None:
    """Remove the staging tables that nobody owns any more, and those of earlier runs of the job `job_id`.

    An earlier run that is still alive may fail then, with nothing written.
    """
    with connection.transaction():
        for name, qualified in connection.execute(
            statement("staging", "orphans", table), {"job_id": job_id}
        ).fetchall():
            connection.execute(statement("staging", "end_lease", table), {"staging": name})
            drop_unless_used(connection, sql.SQL(qualified))


def drop_unless_used(connection: psycopg.Connection[tuple[Any, ...]], staging: sql.Composable) -> None:
    """Drop a staging table, or leave it to a later job while a task still writes to it: nobody waits for that task."""
    try:
        with connection.transaction():
            connection.execute(_WAIT)
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(staging))
    except psycopg.errors.LockNotAvailable:
        return
