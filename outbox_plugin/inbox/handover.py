"""Keeps a partition from its next owner while a handler of an inbox that has left the group still runs.

An inbox that stops leaves the group at once, so that others get its partitions without waiting for its handlers. Before
that, it locks the partitions whose records its handlers have, in Postgres. An inbox that is assigned such a partition
finds it locked, leaves it paused, and asks again. A lock ends with the handlers of its partition, or with the session
that holds it, so the lock of a killed process is gone.

A lock only saves the next owner from waiting for an event that is being handled elsewhere. No promise rests on it: what
a handler does is committed together with its event's key, whoever has the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import psycopg

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.inbox")

LOCK_MILLISECONDS = 1_000  # How long an inbox waits for another one that is looking whether a partition is locked.
RELEASE_SECONDS = 20.0  # How long an inbox that gives up a partition waits for the partition's handlers.
Unlock = Callable[[Collection[TopicPartition]], None]


class Handover:
    """A group's locks on partitions whose records are still being handled."""

    def __init__(self, settings: Settings, group: str) -> None:
        """Prepare the statements; nothing is connected yet."""
        self._settings = settings
        self._place, self._group = settings.table, group
        self._lock, self._unlock, self._patience = (
            statement("inbox", name, settings.table) for name in ("lock_handover", "unlock_handover", "patience")
        )

    @contextmanager
    def locked(self, partitions: Collection[TopicPartition]) -> Iterator[Unlock]:
        """Lock partitions until the context ends.

        If Postgres does not lock them, their next owner waits for the events that are being handled.

        Args:
            partitions: the partitions whose records are being handled.

        Returns:
            A function that unlocks some of them earlier.
        """
        if not partitions:
            yield lambda _: None
            return
        with ExitStack() as opened:
            try:
                connection = opened.enter_context(closing(connect(self._settings, purpose="outbox inbox (handover)")))
                # The transaction is never committed, so a pooler ends the session with it, and the locks with both.
                connection.execute("BEGIN")
                connection.execute(self._patience, {"milliseconds": LOCK_MILLISECONDS})
                connection.execute(self._lock, self._named(partitions))
            except psycopg.Error as error:
                logger.info("partitions are handed over without a lock: %s", one_line(error))
                yield lambda _: None
                return

            def unlock(ended: Collection[TopicPartition]) -> None:
                with suppress(psycopg.Error):  # The session is lost, and the locks with it.
                    connection.execute(self._unlock, self._named(ended))

            yield unlock

    def _named(self, partitions: Collection[TopicPartition]) -> dict[str, object]:
        return handover_locks(self._place, self._group, partitions)


def handover_locks(table: str, group: str, partitions: Collection[TopicPartition]) -> dict[str, object]:
    """Return the values that name the locks of a group's partitions in the statements.

    Args:
        table: the outbox whose schema has the inbox.
        group: the inbox's group.
        partitions: those that are handed over.
    """
    return {
        "place": table,
        "group": group,
        "topics": [topic for topic, _ in partitions],
        "partitions": [partition for _, partition in partitions],
    }
