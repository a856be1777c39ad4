"""The outbox in Postgres for exactly-once delivery.

Windows are read without a lock. A purge deletes a row only if its transaction id, or its creation time, proves that it
is the row that was published.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import psycopg

from outbox_plugin.adapters import postgres_bad_rows
from outbox_plugin.adapters.backlog_keys import BacklogKeys
from outbox_plugin.adapters.deferred_columns import read_deferred_columns
from outbox_plugin.adapters.leadership import Leadership
from outbox_plugin.adapters.postgres_session import Query
from outbox_plugin.adapters.postgres_shard_store import PostgresShardStore
from outbox_plugin.adapters.row_reader import RowReader
from outbox_plugin.adapters.untranslatable_rows import UNTRANSLATABLE
from outbox_plugin.core.postgres_ports import Control, ReadRequest
from outbox_plugin.core.progress import Publication
from outbox_plugin.core.recovery import TermHistory
from outbox_plugin.core.row import OutboxRow, column
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.core.window import BYTES_PER_WINDOW
from outbox_plugin.errors import Fenced, StoreUnavailable
from outbox_plugin.schema.connection import cancel_until_ended, connect, errors_as_unavailable, pipeline
from outbox_plugin.settings import Settings

_EACH = -1  # Each value and each array has more bytes.
_READS = 20  # Reads in a row whose rows are all deleted or changed meanwhile, before an error is raised.
END_SECONDS = 10.0  # How long a cancelled statement is waited for. After that, it is left to its thread.


class PostgresWindowStore(PostgresShardStore):
    """`WindowStore` on psycopg."""

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
        super().__init__(settings, shard, layout)
        self._live_rows = RowReader(self.session)
        self._keys_connection: psycopg.Connection[Any] | None = None  # While `key_hashes_up_to` reads.
        self._keys_read = threading.Event()  # Not set while `key_hashes_up_to` reads, and while it connects.
        self._keys_read.set()
        self._keys_are_wanted = True

    @property
    def layout(self) -> Layout:
        """How many shards the outbox had when the term began."""
        return self.session.layout

    def control(self) -> Control:
        """What operators command, and where the ids stand."""
        self.maintain_history()
        return self.session.control()

    def lead(self, leader_id: str) -> None:
        """Let no earlier leader of the shard park or dead-letter rows any more; durable when it returns."""
        self._leadership = Leadership(self.session, leader_id)

    def check_leads(self) -> None:
        """Raises Fenced if another leader leads the shard."""
        self._led.check()

    def generation(self, slice_: Slice) -> int:
        """Which generation of its transactional id the slice uses."""
        with self.session.durable_transaction() as run:
            found = run("control", "generation", slice=slice_.name).fetchone()
        if found is None:
            raise StoreUnavailable("Postgres: the outbox was truncated or recreated, or has another number of shards")
        return int(found[0])

    def raise_generation(self, slice_: Slice, present: int) -> int:
        """Let the slice use a generation above `present`; durable when it returns. Returns the new one."""
        with self.session.durable_transaction() as run:
            values = {"slice": slice_.name, "generation": present, "leader_id": self._led.leader_id}
            found = run("control", "raise_generation", **values).fetchone()
        if found is None:
            raise Fenced("Postgres: another harvester leads the shard, or the table is no longer the same")
        return int(found[0])

    def begin_term(self, above: int = 0) -> TermHistory:
        """Give the term a number that is above all others, and above `above`; returns what is known of terms."""
        with self.session.durable_transaction() as run:
            found = run("control", "begin_term", above=above).fetchall()
        if not found:
            raise StoreUnavailable(
                f"Postgres: the table {self.session.settings.table!r} is another one now, or has other shards"
            )
        [(number, recorded, unsigned)] = found
        return TermHistory(number, recorded, frozenset(unsigned))

    def mark_recorded(self, term: int) -> None:
        """Remember that the term has written a signed record: from now on, one is expected."""
        with self.session.durable_transaction() as run:
            if not run("control", "recorded", term=term, slice=self.session.slice.name).rowcount:
                raise Fenced("Postgres: another harvester leads the shard, or the outbox is harvested otherwise by now")

    def mark_nothing_in_flight(self, term: int) -> None:
        """Remember that the term has deleted all that it published: no record of it is expected any more."""
        self.session.run("control", "nothing_in_flight", term=term, slice=self.session.slice.name)

    def is_settled(self) -> bool:
        """Whether the shards of all earlier layouts have been fenced and recovered."""
        found = self.session.run("control", "is_settled").fetchone()
        if found is None:
            raise StoreUnavailable("Postgres: the outbox was truncated or recreated, or has another number of shards")
        return bool(found[0])

    def mark_settled(self) -> None:
        """Remember that the shards of all earlier layouts have been fenced and recovered."""
        self.session.run("control", "settled", former=[slice_.name for slice_ in self.layout.former])

    def read(self, request: ReadRequest) -> Sequence[OutboxRow]:
        """The earliest rows of the request, ascending by id. Returns fewer rows if they are large."""
        conditions, values = self._rows.conditions(request)
        if request.in_flight.ranges:
            conditions = *conditions, "not_in_flight"
            values["in_flight"] = request.in_flight.text()
        values["large"] = request.large_bytes
        is_apart, deferred = False, list[int]()
        query = self.session.statement("window", "read_window", conditions)
        opened, fetched = self.session.statement("window", "open_in_binary"), self.session.statement("window", "fetch")
        reader = self._live_rows if request.is_live else self._rows
        for _ in range(_READS):
            try:
                with errors_as_unavailable():
                    rows = reader.read((opened + b" " + query, fetched), (query,), values)
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, UNTRANSLATABLE):
                    raise
                if is_apart:
                    postgres_bad_rows.dead_letter_untranslatable(self._led, self._rows, conditions, values)
                is_apart, values = True, {**values, "large": _EACH}  # All values and headers are then read apart.
                continue
            deferred = [row.id for row in rows if _is_deferred(row)] if None in column(rows, "value") else []
            if not deferred:
                return rows
            if completed := self._completed(rows, deferred):
                return completed  # If none is left, later rows may follow: read again.
        if not deferred:
            raise StoreUnavailable("Postgres: ever new rows have topics and keys that cannot be written in UTF-8")
        raise StoreUnavailable(
            f"Postgres: row {deferred[0]} of {self.session.settings.table!r} has another topic or key at each read; "
            "is the outbox a view that computes them?"
        )

    def _completed(self, rows: Sequence[OutboxRow], deferred: list[int]) -> Sequence[OutboxRow]:
        """The first of `rows`, as many as may be in memory together, with the values of those that are `deferred`.

        A row that somebody has deleted since is not part of the read. The read ends before a row whose topic or key
        somebody has changed since: its record would have the key of one version and the value of another.
        """
        with errors_as_unavailable():
            found = read_deferred_columns(self._rows, deferred, self._limit, BYTES_PER_WINDOW)
        changed = [row.id for row in rows if row.id in found.parts and not found.is_of(row)]
        end = min([*changed, *([] if found.first_unread is None else [found.first_unread])], default=None)
        return [
            found.complete(row, -row.horizon) if _is_deferred(row) else row
            for row in rows
            if (end is None or row.id < end) and (not _is_deferred(row) or row.id in found.parts)
        ]

    def key_hashes(self, rows: Sequence[OutboxRow]) -> Sequence[int]:
        """A hash of each row's topic and key. Reads on the reader."""
        keys = {"topics": list(column(rows, "topic")), "keys": list(column(rows, "key"))}
        with errors_as_unavailable():
            found = self.session.reader.execute(*self.session.query("window", "key_hashes", **keys))
            return [key_hash for (key_hash,) in found.fetchall()]

    def end_of_batch(self, up_to: int) -> int | None:
        """The last id, at most `up_to`, of a transaction that has written many of the latest rows; None without one."""
        with errors_as_unavailable(), pipeline(self.session.reader):
            self.session.reader.execute(self.session.statement("window", "configure_read"))
            found = self.session.reader.execute(*self.session.query("window", "end_of_batch", until=up_to))
            [(last_id,)] = found.fetchall()
            return None if last_id is None else int(last_id)

    def key_hashes_up_to(self, bound: int, rows: int) -> Generator[bytes]:
        """Yield the hashes of `key_hashes` for all rows of the slice up to `bound`, and perhaps for some other rows."""
        self._keys_read.clear()
        try:
            yield from self._read_key_hashes(bound, rows)
        finally:
            self._keys_connection = None
            self._keys_read.set()

    def _read_key_hashes(self, bound: int, rows: int) -> Generator[bytes]:
        settings = self.session.settings
        with (
            errors_as_unavailable(),
            closing(connect(settings, purpose="outbox harvester (keys)", own_name=True)) as connection,
        ):
            self._keys_connection = connection
            if not self._keys_are_wanted:  # From here on, `cancel_key_hashes` ends what runs on the connection.
                raise StoreUnavailable("Postgres: keys are not read any more, as the term ends")
            yield from BacklogKeys(self.session, self._rows, connection).hashes_up_to(bound, rows)

    def cancel_key_hashes(self) -> None:
        """End `key_hashes_up_to`, if it reads, and let it read nothing from now on; from another thread.

        Returns when it has ended, after 10 seconds at most.
        """
        self._keys_are_wanted = False
        cancel_until_ended(lambda: self._keys_connection, self._keys_read.wait, END_SECONDS)

    def purge(self, publications: Sequence[Publication]) -> int:
        """Delete the rows of this term's `publications`; durable when it returns. Returns how many rows there were."""
        named = [each for each in publications if each.ids.ranges]
        with errors_as_unavailable():
            counts = self._purge(["durable"], [self._visible_to_the_read(each) for each in named])
            short = [each for each, count in zip(named, counts, strict=True) if count < len(each.ids)]
            by_times = self._purge_by_times(short)
            if left := sum(self._purge(["configure_read"], [self._seen_by_the_read(each) for each in short])):
                raise StoreUnavailable(
                    f"Postgres: {left} published row(s) of {self.session.settings.table!r} have another create_time "
                    "than when they were read"
                )
            return sum(counts) + by_times

    def recover(self, publications: Sequence[Publication]) -> int:
        """Delete the rows of an earlier term's `publications`. Returns how many rows there were."""
        named = [each for each in publications if each.ids.ranges]
        with errors_as_unavailable():
            untimed = [self._visible_to_the_read(each) for each in named if each.times is None]
            return sum(self._purge(["durable"], untimed)) + self._purge_by_times(named)

    def _purge_by_times(self, publications: Sequence[Publication]) -> int:
        """Delete the rows that their creation times prove.

        Raises:
            StoreUnavailable: some of the rows could not be deleted. The progress record still names them.
        """
        timed = [(each, times) for each in publications if (times := each.times) is not None]
        counts = self._purge(
            ["durable", "configure_read"], [self._created_as_published("purge", *each) for each in timed]
        )
        short = [each for each, count in zip(timed, counts, strict=True) if count < len(each[0].ids)]
        left = sum(
            self._purge(["configure_read"], [self._created_as_published("not_deleted", *each) for each in short])
        )
        if left:
            raise self.session.cannot_delete(left)
        return sum(counts)

    def _visible_to_the_read(self, publication: Publication) -> Query:
        return self._conditional_query(
            "purge",
            "visible_to_the_read",
            ids=publication.ids.text(),
            horizon=publication.horizon,
            created_until=publication.created_until,
            created_from=publication.created_from,
        )

    def _seen_by_the_read(self, publication: Publication) -> Query:
        return self._conditional_query(
            "not_deleted", "seen_by_the_read", ids=publication.ids.text(), horizon=publication.horizon
        )

    def _created_as_published(self, name: str, publication: Publication, times: Sequence[int]) -> Query:
        return self._conditional_query(
            name, "created_as_published", ids=publication.ids.text(), each=list(publication.ids), created=list(times)
        )

    def _conditional_query(self, name: str, condition: str, **values: object) -> Query:
        name = "purge_into_history" if self.keeps_history and name == "purge" else name
        return self.session.with_values(self.session.statement("window", name, (condition,)), values)


def _is_deferred(row: OutboxRow) -> bool:
    """Whether a read left the value and the headers of `row` out: see the statement `read_window`."""
    return row.horizon < 0
