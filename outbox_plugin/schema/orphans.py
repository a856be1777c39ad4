"""Removes staging tables whose jobs are gone."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.schema.statements import statement

_WAIT = sql.SQL("SET LOCAL lock_timeout = '1s'")


def drop_orphans(connection: psycopg.Connection[tuple[Any, ...]], table: str, job_id: str | None = None) -> None:
    """Remove the staging tables that nobody owns any more, and those of earlier runs of the job `job_id`.

    Only tables that a job of this outbox has made are removed. An earlier run that is still alive may fail then, with
    nothing written.
    """
    with connection.transaction():
        found = connection.execute(statement("staging", "orphans", table), {"job_id": job_id}).fetchall()
        for name, schema in found:
            drop_unless_used(connection, table, name, sql.Identifier(schema, name))


def drop_unless_used(
    connection: psycopg.Connection[tuple[Any, ...]], table: str, name: str, staging: sql.Identifier
) -> None:
    """Drop the staging table `name`, which is `staging` in full, and forget it.

    While a task still writes to it, it is left to a later job: nobody waits for that task.
    """
    try:
        with connection.transaction():
            connection.execute(_WAIT)
            connection.execute(statement("staging", "drop_staging", table, staging=staging))
            connection.execute(statement("staging", "unregister", table), {"staging": name})
    except psycopg.errors.LockNotAvailable:
        return
