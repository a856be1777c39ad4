"""A leader's hold on a shard in Postgres: it parks and dead-letters bad rows unless another leader has taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from outbox_plugin.adapters.postgres_session import PostgresSession, Run
from outbox_plugin.adapters.sql_refusals import concerns_all_rows, is_refusal, storable
from outbox_plugin.core.ordering_keys import BadRow
from outbox_plugin.errors import Fenced, StoreUnavailable


class Leadership:
    """Exists from the moment on that the database names this leader as the shard's."""

    def __init__(self, session: PostgresSession, leader_id: str, *, first: Sequence[str] = ()) -> None:
        """Let no earlier leader of the shard park or dead-letter rows any more; durable when it returns.

        Args:
            session: of the term.
            leader_id: never used before.
            first: statements of `mark.sql` that run first, in the same transaction.

        Raises:
            StoreUnavailable: Postgres is away, or refuses.
        """
        self._session = session
        self.leader_id = leader_id
        with session.durable_transaction() as run:
            for name in first:
                run("mark", name)
            run("control", "lead", leader_id=leader_id)

    @contextmanager
    def transaction(self) -> Iterator[Run]:
        """A durable transaction that is committed only if nobody else leads.

        The check comes last: by then the transaction's own lock prevents a TRUNCATE.

        Raises:
            Fenced: another leader leads the shard.
            StoreUnavailable: Postgres is away, or refuses.
        """
        with self._session.durable_transaction() as run:
            yield run
            if not run("control", "leads", leader_id=self.leader_id).rowcount:
                raise Fenced("Postgres: another harvester leads the shard, or the table is no longer the same")

    def check(self) -> None:
        """Raises Fenced if another leader leads the shard."""
        with self.transaction():
            pass

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Let the bad rows' keys wait; durable when it returns.

        Returns those that the database refuses to remember, each with its reason.

        Raises:
            Fenced: another leader leads the shard.
            StoreUnavailable: Postgres is away.
        """

        def park(rows: Sequence[BadRow]) -> Sequence[BadRow]:
            with self.transaction() as run:
                run("control", "park", **_values(rows))
            return []

        return _one_by_one_if_refused(park, bad, "to park it")

    def dead_letter(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Move the bad rows to the dead letters; durable when it returns.

        Returns those that the database refuses to move, each with its reason; they are still in the outbox.

        Raises:
            Fenced: another leader leads the shard.
            StoreUnavailable: Postgres is away.
        """

        def move(rows: Sequence[BadRow]) -> Sequence[BadRow]:
            with self.transaction() as run:
                if run("control", "dead_letter", **_values(rows)).rowcount == len(rows):
                    return []
                ids = [row.row.id for row in rows]
                kept = {id_ for (id_,) in run("control", "there", ids=ids).fetchall()}
            reason = "the table keeps it: a trigger or a policy prevents its deletion"
            return [row.because(reason) for row in rows if row.row.id in kept]

        return _one_by_one_if_refused(move, bad, "to make it a dead letter")


def _values(bad: Sequence[BadRow]) -> dict[str, object]:
    return {
        "ids": [row.row.id for row in bad],
        "whole_topics": [row.ordering_key.whole_topic for row in bad],
        "reasons": [storable(row.refusal.reason) for row in bad],
    }


def _one_by_one_if_refused(
    handle: Callable[[Sequence[BadRow]], Sequence[BadRow]], bad: Sequence[BadRow], purpose: str
) -> Sequence[BadRow]:
    """Call `handle` for all rows; for halves of them where the database refuses all together, and so on.

    So a row that the database refuses costs no other row.

    Args:
        handle: returns the rows that it could not handle, each with its reason.
        bad: the rows.
        purpose: what it does, for the reason of a row that the database refuses.

    Raises:
        StoreUnavailable: an error that is no refusal of a row.
    """
    try:
        return handle(bad)
    except StoreUnavailable as error:
        if not is_refusal(error.__cause__):
            raise
        if len(bad) > 1 and not concerns_all_rows(error.__cause__):
            middle = len(bad) // 2
            halves = bad[:middle], bad[middle:]
            return [row for half in halves for row in _one_by_one_if_refused(handle, half, purpose)]
        return [row.because(f"the database refuses {purpose}: {error}") for row in bad]
