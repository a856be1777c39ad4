"""What the stores of both deliveries share: a shard's session, and how its leader parks and dead-letters rows."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from outbox_plugin.adapters import postgres_bad_rows
from outbox_plugin.adapters.history_partitions import HistoryPartitions
from outbox_plugin.adapters.kafka_clients import largest_record_bytes
from outbox_plugin.adapters.leadership import Leadership
from outbox_plugin.adapters.postgres_session import PostgresSession, Query
from outbox_plugin.adapters.row_reader import RowReader
from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.core.row import RecordLimit
from outbox_plugin.core.shards import Layout
from outbox_plugin.errors import Fenced, StoreUnavailable
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.connection import is_connection_lost
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.harvester")


class PostgresShardStore:
    """The part of `ShardStore` that both deliveries share. A delivery's `lead` sets `_leadership`."""

    def __init__(self, settings: Settings, shard: int, layout: Layout) -> None:
        """Connect, and see who the outbox is.

        Args:
            settings: which outbox, and how long published rows are kept.
            shard: one of those of `layout`.
            layout: that the term begins with.

        Raises:
            StoreUnavailable: Postgres does not let us.
            LayoutChanged: the outbox has another layout, or another group harvests it, by now.
            SchemaMissing: the outbox is not known, or its table is not as it must be.
        """
        self.session = PostgresSession(settings, shard, layout)
        self._rows = RowReader(self.session)
        self._limit = RecordLimit(largest_record_bytes(settings))
        self._leadership: Leadership | None = None
        self._history = HistoryPartitions(settings) if settings.retention else None
        try:
            self.maintain_history()
        except BaseException:
            self.close()
            raise

    @property
    def keeps_history(self) -> bool:
        """Whether rows that are deleted go into the history."""
        return self._history is not None

    def maintain_history(self) -> None:
        """Make and drop the partitions of the history. It runs on the reader, so a purge never waits for it.

        An error of Postgres does not end the term. If the partition of a day is missing in the end, the purge fails.
        """
        if self._history:
            try:
                self._history.maintain(self.session.reader)
            except psycopg.Error as error:
                if self.session.reader.closed:
                    raise StoreUnavailable(f"Postgres: {one_line(error)}") from error
                logger.warning("the days of outbox_history could not be kept: %s", one_line(error))

    def _purge(self, setup: Sequence[str], purges: Sequence[Query]) -> list[int]:
        """How many rows each of `purges` has deleted. The arguments are those of the session's `delete`.

        Raises:
            StoreUnavailable: Postgres refuses to delete the rows, or to move them to the history.
            psycopg.Error: the connection is lost.
        """
        if not purges:
            return []
        try:
            return self.session.delete(setup, purges)
        except psycopg.Error as error:
            if is_connection_lost(error):
                raise
            what = "moved to outbox_history (OUTBOX_RETENTION)" if self.keeps_history else "deleted"
            raise StoreUnavailable(
                f"Postgres: published rows of {self.session.settings.table!r} cannot be {what}: {one_line(error)}. "
                "Nothing more is published until they can be"
            ) from error

    @property
    def identity(self) -> OutboxIdentity:
        """Who the outbox was when the term began."""
        return self.session.identity

    def snapshot(self) -> str:
        """Which transactions have ended."""
        return self.session.snapshot()

    @property
    def _led(self) -> Leadership:
        if self._leadership is None:
            raise Fenced("Postgres: this harvester has not begun to lead the shard")
        return self._leadership

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Park the ordering keys of the bad rows. Returns the rows that the database refuses to park."""
        return postgres_bad_rows.park(self._led, bad)

    def dead_letter(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Move the bad rows to the dead letters. Returns the rows that the database refuses to move."""
        return postgres_bad_rows.dead_letter(self._led, bad)

    def close(self) -> None:
        """Give the connections back. Safe to call twice."""
        self.session.close()
