"""The outbox in Postgres for at-least-once delivery: rows in flight carry their leader's id."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_plugin.adapters.postgres import PostgresOutbox
from outbox_plugin.core.ports import Wanted
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.window import BYTES_PER_WINDOW
from outbox_plugin.schema.connection import reported


class MarkedStore(PostgresOutbox):
    """`MarkedStore` of the ports, on psycopg."""

    def mark(self, leader_id: str, wanted: Wanted) -> Sequence[OutboxRow]:
        """See `MarkedStore.mark`."""
        conditions, values = self._conditions(wanted)
        values |= {"leader_id": leader_id, "bytes": BYTES_PER_WINDOW}
        marking = self._statement("window", "hasty"), self._statement("mark", "mark", conditions)
        with reported():
            return self._rows_of(marking, marking, values).sorted()

    def delete(self, leader_id: str, ids: Sequence[int]) -> int:
        """See `MarkedStore.delete`."""
        with reported():
            return sum(self._deleted(["hasty"], [self._query("mark", "delete", ids=list(ids), leader_id=leader_id)]))

    def reset(self, leader_id: str, ids: Sequence[int]) -> None:
        """See `MarkedStore.reset`."""
        with reported():
            self._purger.execute(*self._query("mark", "reset", ids=list(ids), leader_id=leader_id))
