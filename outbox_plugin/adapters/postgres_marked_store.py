"""The outbox in Postgres for at-least-once delivery: rows in flight carry their leader's id."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from outbox_plugin.adapters.kafka_clients import largest_record_bytes
from outbox_plugin.adapters.postgres import PostgresOutbox
from outbox_plugin.core.ports import Control, Wanted
from outbox_plugin.core.row import OutboxRow, RecordLimit, column
from outbox_plugin.core.window import BYTES_PER_WINDOW
from outbox_plugin.errors import Fenced, StoreUnavailable
from outbox_plugin.schema.connection import one_line, reported

DELIVERED = "ffffffff-ffff-ffff-ffff-ffffffffffff"  # Marks rows that Kafka has and that could not be deleted.
ENDINGS = 10  # How often the last leader's mark is waited for, half a second each, before its session is ended.


class PostgresMarkedStore(PostgresOutbox):
    """`MarkedStore` of the ports, on psycopg."""

    def lead(self, leader_id: str) -> None:
        """See `Outbox.lead`, and `MarkedStore`: the last leader's mark ends first, or is ended.

        A mark takes milliseconds, unless its leader is stopped and receives none of the rows that the server sends it.
        """
        self._values["leader_id"] = leader_id
        for _ in range(ENDINGS):
            try:
                with self._purging():
                    for each in ("wait_a_little", "wait_for_marks", "wait_for_others"):
                        self._purger.execute(*self._query("mark", each))
                    self._execute("lead")
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                    raise
                self._end_markings()
            else:
                self._values["term"] = leader_id  # What rows are marked with may change within a term.
                self._delete_delivered()
                return
        raise StoreUnavailable("Postgres: the last leader of the shard still marks rows")

    def _delete_delivered(self) -> None:
        """Delete rows that an earlier leader has delivered and could not delete."""
        with self._purging():
            self._purger.execute(self._statement("window", "steer"))
            found = self._purger.execute(*self._query("mark", "delivered", delivered=DELIVERED)).fetchall()
        if ids := [id_ for (id_,) in found]:
            self.delete(DELIVERED, ids)

    def _end_markings(self) -> None:
        with self._purger_lock, reported():
            for (pid,) in self._purger.execute(*self._query("mark", "markings")).fetchall():
                try:
                    self._purger.execute(*self._query("mark", "end_session", pid=pid))
                except psycopg.errors.InsufficientPrivilege as error:
                    raise StoreUnavailable(
                        f"Postgres: the session {pid} of the last leader still marks rows, and our role may not end "
                        f"it: {one_line(error)}"
                    ) from error

    def control(self) -> Control:
        """See `Outbox.control`, and `MarkedStore`."""
        control = super().control()
        with reported():
            found = self._reader.execute(*self._query("mark", "is_leader")).fetchall()
        self._check(found)
        return control

    def check_leads(self) -> None:
        """See `MarkedStore.check_leads`."""
        with self._purger_lock, reported():
            found = self._purger.execute(*self._query("mark", "is_leader")).fetchall()
        self._check(found)

    @staticmethod
    def _check(found: Sequence[object]) -> None:
        if not found:
            raise Fenced("Postgres: another harvester leads the shard")

    def mark(self, leader_id: str, wanted: Wanted) -> Sequence[OutboxRow]:
        """See `MarkedStore.mark`."""
        conditions, values = self._conditions(wanted)
        conditions = *conditions, "of_this_leader"
        limit = RecordLimit(largest_record_bytes(self._settings))
        values |= {"leader_id": leader_id, "delivered": DELIVERED, "bytes": BYTES_PER_WINDOW}
        values |= {"largest": limit.value, "largest_headers": limit.headers}
        marking = self._statement("mark", "begin_marking"), self._statement("mark", "mark", conditions)
        with reported():
            rows = self._rows_of(marking, marking, values).sorted()
        return _without_too_large(rows, limit) if any(column(rows, "create_time")) else rows

    def delete(self, leader_id: str, ids: Sequence[int]) -> int:
        """See `MarkedStore.delete`."""
        values: dict[str, object] = {"ids": list(ids), "leader_id": leader_id, "delivered": DELIVERED}
        with reported():
            deleted = sum(self._deleted(["hasty"], [self._query("mark", "delete", **values)]))
            if deleted < len(ids):  # Perhaps because another leader has marked some since.
                left = sum(self._deleted(["durable"], [self._query("mark", "keep_delivered", **values)]))
                if left:
                    raise self._cannot_delete(left)
        return deleted

    def reset(self, leader_id: str, ids: Sequence[int]) -> None:
        """See `MarkedStore.reset`."""
        with reported(), self._purger_lock:
            self._purger.execute(*self._query("mark", "reset", ids=list(ids), leader_id=leader_id))


def _without_too_large(rows: Sequence[OutboxRow], limit: RecordLimit) -> list[OutboxRow]:
    """The `rows`; of those of which something was left out for its size, `create_time` has the size."""

    def known(row: OutboxRow) -> OutboxRow:
        size = row.create_time
        stands_for = limit.too_large(size, -size) if size else None
        if stands_for is None:
            return row
        return row._replace(value=stands_for, header_keys=[], header_values=[], create_time=0)

    return [known(row) for row in rows]
