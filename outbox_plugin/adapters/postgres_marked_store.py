"""The outbox in Postgres for at-least-once delivery: rows in flight carry their leader's id."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

import psycopg

from outbox_plugin.adapters import postgres_bad_rows
from outbox_plugin.adapters.deferred_columns import read_deferred_columns
from outbox_plugin.adapters.leadership import Leadership
from outbox_plugin.adapters.markings import ENDINGS
from outbox_plugin.adapters.postgres_shard_store import PostgresShardStore
from outbox_plugin.adapters.untranslatable_rows import UNTRANSLATABLE
from outbox_plugin.core.postgres_ports import Control, ReadRequest
from outbox_plugin.core.row import OutboxRow, RecordLimit, Rows, column
from outbox_plugin.core.window import BYTES_PER_WINDOW
from outbox_plugin.errors import Fenced, StoreUnavailable
from outbox_plugin.printable import one_line
from outbox_plugin.schema.connection import errors_as_unavailable

DELIVERED = "ffffffff-ffff-ffff-ffff-ffffffffffff"  # Marks rows that Kafka has and that could not be deleted.
_FEW, _READS = 100, 20  # Of rows with texts that Postgres cannot send.
_MARKS_OF_LEFT_ROWS = 20  # So many marks in a row may leave the first row of the request, each another one.
_WHOLE = 1  # Stands for the time of creation of a whole record: see the statement `mark`.


class PostgresMarkedStore(PostgresShardStore):
    """`MarkedStore` of `core.postgres_ports`, on psycopg."""

    def lead(self, leader_id: str) -> None:
        """Let no earlier leader of the shard mark, park or dead-letter rows any more; durable when it returns.

        Waits until the last leader's mark has ended, and ends its session if that takes long. A mark takes
        milliseconds, unless its leader is stopped and does not receive the rows that the server sends.
        """
        for _ in range(ENDINGS):
            try:
                self._leadership = Leadership(
                    self.session, leader_id, first=("wait_a_little", "wait_for_marks", "wait_for_others")
                )
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                    raise
                self._end_markings()
            else:
                self._delete_delivered()
                return
        raise StoreUnavailable("Postgres: the last leader of the shard still marks rows")

    def _delete_delivered(self) -> None:
        """Delete the rows that a leader has delivered and could not delete, wherever in the table they are."""
        while noted := self.session.run("mark", "noted_delivered").fetchall():
            while ids := self._delivered_ids():
                self.delete(DELIVERED, ids)
            self.session.run("mark", "forget_delivered", noted=noted[0][0])

    def _delivered_ids(self) -> list[int]:
        with self.session.durable_transaction() as run:  # It has no time-out.
            return [id_ for (id_,) in run("mark", "delivered", delivered=DELIVERED).fetchall()]

    def _end_markings(self) -> None:
        for (pid,) in self.session.run("mark", "markings").fetchall():
            try:
                self.session.run("mark", "end_session", pid=pid)
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
                    raise
                raise StoreUnavailable(
                    f"Postgres: the session {pid} of the last leader still marks rows, and our role may not end "
                    f"it: {one_line(error.__cause__)}"
                ) from error.__cause__

    def control(self) -> Control:
        """What operators command, and where the ids stand; raises Fenced if another leader leads the shard."""
        self.maintain_history()
        control = self.session.control()
        with errors_as_unavailable():
            query = self.session.query("mark", "is_leader", leader_id=self._led.leader_id)
            found = self.session.reader.execute(*query).fetchall()
        self._check(found)
        return control

    def check_leads(self) -> None:
        """Raises Fenced if another leader leads the shard."""
        self._check(self.session.run("mark", "is_leader", leader_id=self._led.leader_id).fetchall())

    @staticmethod
    def _check(found: Sequence[object]) -> None:
        if not found:
            raise Fenced("Postgres: another harvester leads the shard")

    def mark(self, mark_id: str, request: ReadRequest) -> Sequence[OutboxRow]:
        """Mark the earliest rows of the request that carry another id, or none, with `mark_id`.

        `mark_id` may change within a term; the statement marks nothing once another leader leads the shard. If a mark
        leaves a row out, the rows behind that one are not marked either: they would overtake it.
        """
        left, left_before = list[int](), list[int]()
        for _ in range(_MARKS_OF_LEFT_ROWS):
            rows, last_id = self._mark(mark_id, request)
            if last_id is None:
                return rows
            if not (left := self._unmarked(mark_id, replace(request, ids=request.ids._replace(up_to=last_id)))):
                return rows
            self._unmark(mark_id, [row.id for row in rows if row.id > left[0]])
            if before := [row for row in rows if row.id < left[0]]:
                return before
            if left == left_before:
                break
            left_before = left
        raise StoreUnavailable(
            f"Postgres: the row {left[0]} of {self.session.settings.table!r} cannot be marked, and no row behind it is "
            "published: does a trigger or a policy of the table prevent its update?"
        )

    def _unmark(self, mark_id: str, ids: Sequence[int]) -> None:
        """As `reset`, but raise StoreUnavailable if rows keep the mark id: no mark of this id would find them again."""
        self.reset(mark_id, ids)
        kept = self.session.run("mark", "still_marked", ids=list(ids), mark_id=mark_id, delivered=DELIVERED).fetchall()
        if kept:
            raise StoreUnavailable(
                f"Postgres: {len(kept)} row(s) of {self.session.settings.table!r} cannot lose their mark, and an "
                "earlier row cannot be marked: does a trigger or a policy of the table prevent their update?"
            )

    def _mark(self, mark_id: str, request: ReadRequest) -> tuple[Sequence[OutboxRow], int | None]:
        """Mark rows, and return those that are marked now.

        Returns also the last one's id if it has left out rows that it had found; None if it has not.
        """
        conditions, values = self._marking(mark_id, request)
        values |= {"bytes": BYTES_PER_WINDOW, "largest": self._limit.value, "largest_headers": self._limit.headers}
        session = self.session
        marking = session.statement("mark", "begin_marking"), session.statement("mark", "mark", conditions)
        try:
            with errors_as_unavailable():
                rows, last_id = _marked(self._rows.read(marking, marking, values))
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, UNTRANSLATABLE):
                raise
            return self._mark_apart(marking, conditions, values, request.limit)
        return (self._completed(rows) if any(column(rows, "create_time")) else rows), last_id

    def has_unmarked(self, mark_id: str, request: ReadRequest) -> bool:
        """Whether there are rows that `mark` would mark."""
        return bool(self._unmarked(mark_id, request))

    def _unmarked(self, mark_id: str, request: ReadRequest) -> list[int]:
        """The id of the earliest row that `mark` would mark; none if there is no such row."""
        conditions, values = self._marking(mark_id, request)
        with errors_as_unavailable():
            return self._rows.ids("earliest_ids", conditions, {**values, "limit": 1})

    def _marking(self, mark_id: str, request: ReadRequest) -> tuple[tuple[str, ...], dict[str, object]]:
        """The conditions of a mark, and their values."""
        conditions, values = self._rows.conditions(request)
        values |= {"mark_id": mark_id, "leader_id": self._led.leader_id, "delivered": DELIVERED}
        return (*conditions, "not_marked", "of_this_leader"), values

    def _mark_apart(
        self, marking: tuple[bytes, bytes], conditions: tuple[str, ...], values: dict[str, object], limit: int
    ) -> tuple[Sequence[OutboxRow], int | None]:
        """As `_mark`, but mark few rows, and read all values and headers apart, as Postgres cannot send some."""
        few = {**values, "largest": -1, "largest_headers": -1, "limit": min(_FEW, limit)}
        for _ in range(_READS):
            try:
                with errors_as_unavailable():
                    rows, last_id = _marked(self._rows.read(marking, marking, few))
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, UNTRANSLATABLE):
                    raise
                postgres_bad_rows.dead_letter_untranslatable(self._led, self._rows, conditions, values)
            else:
                return self._completed([row._replace(create_time=_WHOLE) for row in rows]), last_id
        raise StoreUnavailable("Postgres: ever new rows have topics and keys that cannot be written in UTF-8")

    def _completed(self, rows: Sequence[OutboxRow]) -> list[OutboxRow]:
        """The `rows`, with the values and headers that the statement has left out of some of them.

        A row that somebody has deleted since is not part of the mark. A row that somebody has changed since gets its
        present topic and key: it is marked, so it must be sent.

        Raises:
            StoreUnavailable: whatever Postgres says. The rows stay marked, so the term must end.
        """
        rows = _without_too_large(rows, self._limit)
        whole = [row.id for row in rows if row.create_time == _WHOLE]
        if not whole:
            return rows
        with errors_as_unavailable():
            found = read_deferred_columns(self._rows, whole, self._limit, inf)
        return [
            found.complete(found.with_present_key(row), row.horizon)._replace(create_time=0)
            if row.create_time == _WHOLE
            else row
            for row in rows
            if row.create_time != _WHOLE or row.id in found.parts
        ]

    def delete(self, mark_id: str, ids: Sequence[int]) -> int:
        """Delete the rows that still carry the mark id. Returns how many there were.

        Raises:
            StoreUnavailable: Postgres is away, or rows cannot be deleted. Nobody marks these again: they are published.
        """
        values: dict[str, object] = {"ids": list(ids), "mark_id": mark_id, "delivered": DELIVERED}
        name = "delete_into_history" if self.keeps_history else "delete"
        with errors_as_unavailable():
            try:
                [deleted] = self._purge(["not_durable"], [self.session.query("mark", name, **values)])
            except StoreUnavailable:
                self._keep_after_error(values)
                raise
            # Another leader may have marked some. A trigger or a policy has kept the others.
            if deleted < len(ids) and (left := self._keep(values)):
                raise self.session.cannot_delete(left)
        return deleted

    def _keep(self, values: dict[str, object]) -> int:
        """Let nobody mark the published rows again, and the next leader delete them. Returns how many there are."""
        queries = [self.session.query("mark", name, **values) for name in ("keep_delivered", "still_marked")]
        return self.session.delete(["durable"], queries)[-1]

    def _keep_after_error(self, values: dict[str, object]) -> None:
        """As `_keep`. Where Postgres refuses that, too, they are marked again, and repeated."""
        if values["mark_id"] != DELIVERED:
            with suppress(psycopg.Error):
                self._keep(values)

    def reset(self, mark_id: str, ids: Sequence[int]) -> None:
        """Take the mark id off the rows again, where they still carry it."""
        self.session.run("mark", "reset", ids=list(ids), mark_id=mark_id)


def _marked(rows: Rows) -> tuple[Rows, int | None]:
    """Those of the rows that are marked, ascending by id; and the last one's id if there should have been others.

    The statement `mark` returns in `horizon` how many rows it has found, or 0 for a row that is not marked.
    """
    if set(column(rows, "horizon")) <= {len(rows)}:
        return rows.sorted(), None
    marked = Rows([fields for fields in rows.fields if OutboxRow(*fields).horizon]).sorted()
    return marked, marked[-1].id if marked else None


def _without_too_large(rows: Sequence[OutboxRow], limit: RecordLimit) -> list[OutboxRow]:
    """The `rows`, where a value that is too large for a record is a `TooLarge`.

    The statement `mark` returns the size of such a row in `create_time`.
    """

    def known(row: OutboxRow) -> OutboxRow:
        size = row.create_time
        stands_for = limit.too_large(size, -size) if size not in (0, _WHOLE) else None
        if stands_for is None:
            return row
        return row._replace(value=stands_for, header_keys=[], header_values=[], create_time=0)

    return [known(row) for row in rows]
