"""Removes staging tables whose jobs are gone."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.schema.statements import statement

_WAIT = sql.SQL("SET LOCAL lock_timeout = '1s'")


def drop_orphans(connection: psycopg.Connection[tuple[Any, ...]], table: str, job_id: str | None = None) -> None:
    """Remove the staging tables that nobody owns any more, and those of earlier runs of the job `job_id`.

    Only tables that jobs of this outbox created are removed. If an earlier run of the job is still alive, it may then
    fail, with nothing written.

    Args:
        connection: to the database of the outbox.
        table: the outbox.
        job_id: a job that is about to run; None if there is none.
    """
    with connection.transaction():
        found = connection.execute(statement("staging", "orphans", table), {"job_id": job_id}).fetchall()
        for name, schema in found:
            drop_unless_used(connection, table, name, sql.Identifier(schema, name))


def drop_unless_used(
    connection: psycopg.Connection[tuple[Any, ...]], table: str, name: str, staging: sql.Identifier
) -> None:
    """Drop a staging table and unregister it, unless a task still writes to it: then a later job removes it.

    Args:
        connection: to the database of the outbox.
        table: the outbox.
        name: the staging table, without its schema.
        staging: the staging table, with its schema.
    """
    try:
        with connection.transaction():
            connection.execute(_WAIT)
            connection.execute(statement("staging", "drop_staging", table, staging=staging))
            connection.execute(statement("staging", "unregister", table), {"staging": name})
    except psycopg.errors.LockNotAvailable:
        return
