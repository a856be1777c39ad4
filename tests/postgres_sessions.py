"""How many sessions of a database wait, as Postgres itself says."""

from __future__ import annotations

import psycopg

from outbox_plugin.settings import Settings


def sessions_waiting_for_a_lock(settings: Settings) -> int:
    """How many sessions of the database wait for a lock that another session holds."""
    return _count(settings, "SELECT count(*) FROM pg_stat_activity WHERE {here} AND wait_event_type = 'Lock'")


def sessions_waiting_to_write(settings: Settings) -> int:
    """How many sessions of the database cannot write their answer, because their client does not read it."""
    return _count(settings, "SELECT count(*) FROM pg_stat_activity WHERE {here} AND wait_event = 'ClientWrite'")


def sessions_marking(settings: Settings) -> int:
    """How many sessions of the database mark rows, or wait for those that do."""
    return _count(
        settings,
        "SELECT count(*) FROM pg_stat_activity WHERE {here} AND state <> 'idle' AND pid <> pg_backend_pid() "
        "AND query LIKE '%SET leader_id%'",
    )


def leaders_asleep(settings: Settings) -> int:
    """How many leaders sleep, or tenants rest, until a writer wakes them: each one's wake-up lock is held meanwhile."""
    return _count(
        settings,
        "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
        "WHERE {here} AND locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted",
    )


def _count(settings: Settings, query: str) -> int:
    """Run the query in a transaction of its own: within one, Postgres shows the same state again and again."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        row = connection.execute(query.format(here="datname = current_database()").encode()).fetchone()
    return int(row[0]) if row else 0
