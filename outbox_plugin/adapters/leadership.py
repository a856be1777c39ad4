"""A leader's hold on a shard in Postgres: its transactions commit only while no other leader leads the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outbox_plugin.adapters.postgres_session import PostgresSession, Run
from outbox_plugin.errors import Fenced, StoreUnavailable


class Leadership:
    """Exists from the moment on when the database names this leader as that of the shard."""

    def __init__(self, session: PostgresSession, leader_id: str, *, first: Sequence[str] = ()) -> None:
        """Let no earlier leader of the shard park or dead-letter rows any more; durable when it returns.

        Args:
            session: of the term.
            leader_id: never used before.
            first: statements of `mark.sql` that run first, in the same transaction.

        Raises:
            StoreUnavailable: Postgres is away, or refuses. Or the outbox is no longer the one that the term began with,
                or has another number of shards: the next term's session finds out which.
        """
        self._session = session
        self.leader_id = leader_id
        with session.durable_transaction() as run:
            for name in first:
                run("mark", name)
            if not run("control", "lead", leader_id=leader_id).rowcount:
                raise StoreUnavailable(
                    "Postgres: the outbox was truncated or recreated, or has another number of shards"
                )

    @contextmanager
    def transaction(self) -> Iterator[Run]:
        """A durable transaction that is committed only if nobody else leads.

        The check comes last: by then the transaction's own lock prevents a TRUNCATE.

        Raises:
            Fenced: another leader leads the shard.
            StoreUnavailable: Postgres is away, or refuses; or the outbox takes whole records by now, and the term does
                not know it.
        """
        with self._session.durable_transaction() as run:
            self._session.check_columns(run)
            yield run
            self._check(run)

    def check(self) -> None:
        """Raises Fenced if another leader leads the shard."""
        with self._session.durable_transaction() as run:
            self._check(run)

    def _check(self, run: Run) -> None:
        if not run("control", "leads", leader_id=self.leader_id).rowcount:
            raise Fenced("Postgres: another harvester leads the shard, or the table is no longer the same")
