"""The outbox in Postgres for exactly-once delivery: windows are read without a lock, and purged by what proves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from outbox_plugin.adapters.history_partitions import HistoryPartitions
from outbox_plugin.adapters.kafka_clients import largest_record_bytes
from outbox_plugin.adapters.postgres import PostgresOutbox, Query
from outbox_plugin.core.ports import Control, Wanted
from outbox_plugin.core.progress import Publication
from outbox_plugin.core.row import OutboxRow, RecordLimit, column
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.core.takeover import Terms
from outbox_plugin.core.window import BYTES_PER_WINDOW
from outbox_plugin.errors import Fenced, StoreUnavailable
from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import one_line, reported
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.harvester")


class PostgresWindowStore(PostgresOutbox):
    """`OutboxStore` on psycopg."""

    def __init__(self, settings: Settings, shard: int, layout: Layout) -> None:
        """See `PostgresOutbox`."""
        super().__init__(settings, shard, layout)
        self._history = HistoryPartitions(settings) if settings.retention else None
        self._slice = Slice(shard, layout.shards)
        self._limit = RecordLimit(largest_record_bytes(settings))
        try:
            self._keep_days()
        except BaseException:
            self.close()
            raise

    def control(self) -> Control:
        """See `Outbox.control`."""
        self._keep_days()
        return super().control()

    def _keep_days(self) -> None:
        """Beside the reads, so that a purge never waits for it. What Postgres refuses here must not end a term.

        Where the partition of a day is missing in the end, the purge says so.
        """
        if self._history:
            try:
                self._history.maintain(self._reader)
            except psycopg.Error as error:
                if self._reader.closed:
                    raise StoreUnavailable(f"Postgres: {one_line(error)}") from error
                logger.warning("the days of outbox_history could not be kept: %s", one_line(error))

    def check_leads(self) -> None:
        """See `OutboxStore.check_leads`."""
        with self._leading():
            pass

    def generation(self, slice_: Slice) -> int:
        """See `OutboxStore.generation`."""
        with self._purging():
            found = self._execute("generation", slice=slice_.name).fetchone()
        if found is None:
            raise StoreUnavailable("Postgres: the outbox was truncated or made anew, or has another number of shards")
        return int(found[0])

    def raise_generation(self, slice_: Slice, present: int) -> int:
        """See `OutboxStore.raise_generation`."""
        with self._purging():
            found = self._execute("raise_generation", slice=slice_.name, generation=present).fetchone()
        if found is None:
            raise Fenced("Postgres: another harvester leads the shard, or the table is no longer the same")
        return int(found[0])

    def begin_term(self, above: int = 0) -> Terms:
        """See `OutboxStore.begin_term`."""
        with self._purging():
            found = self._execute("begin_term", above=above).fetchall()
        if not found:
            raise StoreUnavailable(
                f"Postgres: the table {self._settings.table!r} is another one now, or has other shards"
            )
        [(number, recorded, unsigned)] = found
        return Terms(number, recorded, frozenset(unsigned))

    def recorded(self, term: int) -> None:
        """See `OutboxStore.recorded`."""
        with self._purging():
            if not self._execute("recorded", term=term, slice=self._slice.name).rowcount:
                raise Fenced("Postgres: another harvester leads the shard, or the outbox is harvested otherwise by now")

    def nothing_in_flight(self, term: int) -> None:
        """See `OutboxStore.nothing_in_flight`."""
        with reported(), self._purger_lock:
            self._execute("nothing_in_flight", term=term, slice=self._slice.name)

    def is_settled(self) -> bool:
        """See `OutboxStore.is_settled`."""
        with reported(), self._purger_lock:
            found = self._execute("is_settled").fetchone()
        if found is None:
            raise StoreUnavailable("Postgres: the outbox was truncated or made anew, or has another number of shards")
        return bool(found[0])

    def settled(self) -> None:
        """See `OutboxStore.settled`."""
        with reported(), self._purger_lock:
            self._execute("settled", former=[each.name for each in self._layout.former])

    def read(self, wanted: Wanted) -> Sequence[OutboxRow]:
        """See `OutboxStore.read`."""
        conditions, values = self._conditions(wanted)
        if wanted.in_flight.ranges:
            conditions = *conditions, "not_in_flight"
            values["in_flight"] = wanted.in_flight.text()
        values["large"] = wanted.large_bytes
        query = self._statement("window", "read_window", conditions)
        opened, fetched = self._statement("window", "open_in_binary"), self._statement("window", "fetch")
        while True:
            with reported():
                rows = self._rows_of((opened + b" " + query, fetched), (query,), values)
            left_out = [row.id for row in rows if _was_left_out(row)] if None in column(rows, "value") else []
            if not left_out:
                return rows
            if whole := self._whole(rows, left_out):
                return whole  # Else all of them have vanished, and what is behind them was not read yet.

    def _whole(self, rows: Sequence[OutboxRow], left_out: list[int]) -> Sequence[OutboxRow]:
        """The first of `rows`, as many as may be in memory together, with the values and headers that were `left_out`.

        A value, or headers, that are larger than any record are never read: they may have hundreds of megabytes.

        A row that somebody has deleted since is not part of the read: without its value it would be a tombstone.
        """
        with reported():
            sizes = self._of_rows("large_rows", left_out)
            large: list[int] = []
            parts: dict[int, tuple[Any, ...]] = {}  # The value, and the two arrays of headers.
            last_id, total = rows[-1].id, 0
            for id_, (value, headers) in sizes.items():
                if (too_large := self._limit.too_large(value, headers)) is not None:
                    parts[id_] = too_large, [], []
                    continue
                total += value + headers
                if large and total > BYTES_PER_WINDOW:
                    last_id = id_ - 1
                    break
                large.append(id_)
            parts |= self._of_rows("left_out", large) if large else {}
        return [
            OutboxRow._make((*row[:4], *parts[row.id], -row.horizon)) if _was_left_out(row) else row
            for row in rows
            if row.id <= last_id and (not _was_left_out(row) or row.id in parts)
        ]

    def purge(self, publications: Sequence[Publication]) -> int:
        """See `OutboxStore.purge`."""
        named = [each for each in publications if each.ids.ranges]
        with reported():
            counts = self._purge(["durable"], [self._visible_to_the_read(each) for each in named])
            short = [each for each, count in zip(named, counts, strict=True) if count < len(each.ids)]
            return sum(counts) + self._purge_by_times(short)

    def recover(self, publications: Sequence[Publication]) -> int:
        """See `OutboxStore.recover`."""
        named = [each for each in publications if each.ids.ranges]
        with reported():
            untimed = [self._visible_to_the_read(each) for each in named if each.times is None]
            return sum(self._purge(["durable"], untimed)) + self._purge_by_times(named)

    def _purge_by_times(self, publications: Sequence[Publication]) -> int:
        """Delete the rows that their creation times prove.

        Raises:
            StoreUnavailable: such rows are still there. The progress record names them for as long.
        """
        timed = [(each, times) for each in publications if (times := each.times) is not None]
        counts = self._purge(["durable", "steer"], [self._created_as_published("purge", *each) for each in timed])
        short = [each for each, count in zip(timed, counts, strict=True) if count < len(each[0].ids)]
        left = sum(self._purge(["steer"], [self._created_as_published("not_deleted", *each) for each in short]))
        if left:
            raise self._cannot_delete(left)
        return sum(counts)

    def _purge(self, first: Sequence[str], purges: Sequence[Query]) -> list[int]:
        """How many rows each of `purges` has deleted."""
        if not purges:
            return []
        return self._deleted(first, purges)

    def _visible_to_the_read(self, publication: Publication) -> Query:
        return self._purging_if(
            "purge",
            "visible_to_the_read",
            ids=publication.ids.text(),
            horizon=publication.horizon,
            created_until=publication.created_until,
            created_from=publication.created_from,
        )

    def _created_as_published(self, name: str, publication: Publication, times: Sequence[int]) -> Query:
        return self._purging_if(
            name, "created_as_published", ids=publication.ids.text(), each=list(publication.ids), created=list(times)
        )

    def _purging_if(self, name: str, condition: str, **values: object) -> Query:
        name = "purge_into_history" if self._history and name == "purge" else name
        return self._statement("window", name, (condition,)), {**self._values, **values}


def _was_left_out(row: OutboxRow) -> bool:
    """Whether a read left the value and the headers of `row` out: see the statement `read_window`."""
    return row.horizon < 0
