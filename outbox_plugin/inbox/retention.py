"""Deletes handled keys and dead letters that are older than they are kept, in small batches.

One process of a group does so at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

ROWS_AT_A_TIME = 5_000


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the keys of handled events, and dead letters, are kept."""

    handled: timedelta
    dead_letters: timedelta


def clean(connection: psycopg.Connection[Any], settings: Settings, group: str, keep: Retention) -> bool:
    """Delete one small batch of a group's keys and dead letters whose time has passed, in a transaction of its own.

    Args:
        connection: in autocommit mode.
        settings: which outbox's schema has the inbox.
        group: the inbox's group.
        keep: for how long keys and dead letters are kept.

    Returns:
        Whether there may be more. It is False, too, while another process of the group is cleaning.
    """

    def run(name: str, **values: object) -> psycopg.Cursor[Any]:
        return connection.execute(statement("inbox", name, settings.table), {"group": group, **values})

    with connection.transaction():
        [(alone,)] = run("clean_alone", place=settings.table).fetchall()
        if not alone:
            return False
        handled = run("clean_handled", keep=keep.handled, limit=ROWS_AT_A_TIME).rowcount
        letters = run("clean_letters", keep=keep.dead_letters, limit=ROWS_AT_A_TIME).rowcount
    return ROWS_AT_A_TIME in (handled, letters)
