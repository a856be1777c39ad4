"""The outbox in Postgres for at-least-once delivery: rows in flight carry their leader's id."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_plugin.adapters.kafka import largest_record_bytes
from outbox_plugin.adapters.postgres import PostgresOutbox
from outbox_plugin.core.ports import Control, Wanted
from outbox_plugin.core.row import OutboxRow, TooLarge, column
from outbox_plugin.core.window import BYTES_PER_WINDOW
from outbox_plugin.errors import Fenced
from outbox_plugin.schema.connection import reported


class MarkedStore(PostgresOutbox):
    """`MarkedStore` of the ports, on psycopg."""

    def lead(self, leader_id: str) -> None:
        """See `Outbox.lead`."""
        super().lead(leader_id)
        with reported():
            self._reader.execute(self._statement("window", "not_unread_for_long"))
        self._values["term"] = leader_id  # What rows are marked with may change within a term.

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
        largest = largest_record_bytes(self._settings)
        values |= {"leader_id": leader_id, "bytes": BYTES_PER_WINDOW, "largest": largest}
        marking = self._statement("window", "hasty"), self._statement("mark", "mark", conditions)
        with reported():
            rows = self._rows_of(marking, marking, values).sorted()
        return _without_too_large(rows, largest) if any(column(rows, "create_time")) else rows

    def delete(self, leader_id: str, ids: Sequence[int]) -> int:
        """See `MarkedStore.delete`."""
        with reported():
            return sum(self._deleted(["hasty"], [self._query("mark", "delete", ids=list(ids), leader_id=leader_id)]))

    def reset(self, leader_id: str, ids: Sequence[int]) -> None:
        """See `MarkedStore.reset`."""
        with reported(), self._purger_lock:
            self._purger.execute(*self._query("mark", "reset", ids=list(ids), leader_id=leader_id))


def _without_too_large(rows: Sequence[OutboxRow], largest: int) -> list[OutboxRow]:
    """The `rows`; of those whose values were left out for their size, `create_time` has the size."""

    def known(row: OutboxRow) -> OutboxRow:
        size = row.create_time
        return row._replace(value=TooLarge(size, largest), create_time=0) if size else row

    return [known(row) for row in rows]
