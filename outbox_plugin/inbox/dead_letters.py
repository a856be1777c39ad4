"""Dead letters: events that groups gave up on, kept as they came, to be shown, tried again, or discarded.

A command to try one again is written to its row. The process that has its partition puts it into its key's queue, and
handles it in the transaction that removes the dead letter.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.received import Received
from outbox_plugin.schema.connection import command_connection
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings

RETRY_AT_A_TIME = 100
MAX_SHOWN = 1_000


@dataclass(frozen=True, slots=True)
class InboxDeadLetter:
    """A dead letter, without the event's value and headers."""

    id: int
    group: str
    topic: str
    partition: int
    offset: int
    key: bytes | None
    idempotency_key: str
    error: str
    attempts: int
    failed_at: datetime
    retry_at: datetime | None

    def to_json(self) -> dict[str, object]:
        """Return it as JSON. Bytes of the key that are not UTF-8 are escaped."""
        return {
            "id": self.id,
            "group": self.group,
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "key": None if self.key is None else self.key.decode("utf-8", "backslashreplace"),
            "idempotency_key": self.idempotency_key,
            "error": self.error,
            "attempts": self.attempts,
            "failed_at": self.failed_at.isoformat(),
            "retry_at": self.retry_at and self.retry_at.isoformat(),
        }


def exception_line(error: str) -> str:
    """The line of a traceback that names the last exception, and begins its message.

    A message may have further lines: Postgres shows the statement, and a caret below it. Where no stack is kept, it is
    the last line.
    """
    lines = [line for line in error.splitlines() if line.strip()]
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  File ")), default=len(lines))
    named = (line for line in lines[last_frame:] if not line.startswith(" "))
    return next(named, lines[-1].strip() if lines else "")


class DeadLetters:
    """The dead letters of an outbox's database.

    Every method raises:
        SchemaMissing: the inbox's tables are not there.
        ServerRefused: the database cannot be reached, or says no.
        StoreUnavailable: Postgres went away meanwhile. If that was at the commit, nobody knows whether it was done.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def list(self, group: str | None = None) -> list[InboxDeadLetter]:
        """Return the oldest dead letters, at most 1,000, of one group or of all (None)."""
        return [InboxDeadLetter(*row) for row in self._run("letters", group=group, limit=MAX_SHOWN)]

    def retry(self, ids: Sequence[int] | None, group: str | None = None) -> builtins.list[int]:
        """Have these dead letters, or all (None), tried again. Returns the ids of those that exist."""
        return self._change("ask_retry", ids, group)

    def discard(self, ids: Sequence[int] | None, group: str | None = None) -> builtins.list[int]:
        """Delete these dead letters, or all (None). Returns the ids of those that existed."""
        return self._change("discard", ids, group)

    def _change(self, name: str, ids: Sequence[int] | None, group: str | None) -> builtins.list[int]:
        return [number for (number,) in self._run(name, ids=None if ids is None else [*ids], group=group)]

    def _run(self, name: str, **values: object) -> Sequence[tuple[Any, ...]]:
        with command_connection(self._settings, purpose="outbox inbox", role="operator") as connection:
            table = with_schema(connection, self._settings.table)
            return connection.execute(statement("inbox", name, table), values).fetchall()


def to_retry(
    connection: psycopg.Connection[Any], settings: Settings, group: str, partitions: Sequence[TopicPartition]
) -> Sequence[Received]:
    """Dead letters of these partitions that somebody wants tried again, as they came.

    Args:
        connection: in autocommit mode.
        settings: which outbox's schema has the inbox.
        group: the inbox's group.
        partitions: those that this inbox has now.
    """
    values = {
        "group": group,
        "topics": [topic for topic, _ in partitions],
        "partitions": [partition for _, partition in partitions],
        "limit": RETRY_AT_A_TIME,
    }
    rows = connection.execute(statement("inbox", "letters_to_retry", settings.table), values).fetchall()
    return [
        Received(topic, partition, offset, at, key, value, tuple(zip(names, texts, strict=True)), identity, number)
        for number, topic, partition, offset, at, key, value, names, texts, identity in rows
    ]
