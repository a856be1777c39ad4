"""Records an event's key as handled in the transaction of its effect, and checks that it stays this transaction.

A handler has that transaction's connection for itself. What it may do to the transaction, and what follows:

    COMMIT                    what it did stays; keys of events that have not been handled are forgotten again
    ROLLBACK                  it has failed
    PREPARE TRANSACTION       the prepared transaction is rolled back, and it has failed
    ROLLBACK TO a savepoint   that an event before it has left open: all are undone, and handled one by one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import psycopg
from psycopg import sql

from outbox_plugin.errors import HandlerMisuse
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.session import Begun, HandlerSession
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.statements import statement

logger = logger_of("outbox_plugin.inbox")

SETTLE_ATTEMPTS = 10
SETTLE_SECONDS = 0.5


class OneKeyOfTwoSources(Exception):
    """Events that are to be recorded at once have one key, and are of two topics or types."""


class HandledKeys:
    """What one consumer group has handled."""

    def __init__(self, table: str, group: str) -> None:
        self._group = group
        self._record, self._known_formerly, self._became, self._forget, self._lock_letter, self._mark = (
            statement("inbox", name, table)
            for name in ("record_handled", "known_formerly", "became", "forget_handled", "lock_letter", "mark")
        )
        self._roll_back = statement("inbox", "roll_back_prepared", table)

    async def record(self, session: HandlerSession, records: Sequence[Received]) -> tuple[dict[str, str], Begun | None]:
        """Record events as handled, in the session's transaction, which is begun by that.

        Returns:
            The keys of those that had not been handled, each with its source; and the transaction, None where there
            are no such keys.

        Raises:
            OneKeyOfTwoSources: such events cannot be recorded at once.
        """
        records = await self._not_known_formerly(session, records)
        sources: dict[str, str] = {}
        for record in records:
            source = record.source
            if sources.setdefault(record.idempotency_key, source) != source:
                raise OneKeyOfTwoSources
        if not sources:
            return {}, None
        sign = session.new_sign()
        events: dict[str, object] = {
            "group": self._group,
            "keys": _text_array(sources),
            "sources": _text_array(sources.values()),
            "count": len(sources),
            "sign": sign,
        }
        [(count, keys, transaction_id)] = await session.fetch(self._record, events)
        fresh = sources if count == len(sources) else {key: sources[key] for key in keys or ()}
        return fresh, Begun(transaction_id, sign) if fresh else None

    async def _not_known_formerly(self, session: HandlerSession, records: Sequence[Received]) -> Sequence[Received]:
        """The events that no version before this one has handled, under the name that it gave them."""
        written = {key: record.timestamp for record in records for key in record.formerly}
        if not written:
            return records
        events: dict[str, object] = {"group": self._group, "keys": [*written], "written": [*written.values()]}
        known = {key for (key,) in await session.fetch(self._known_formerly, events)}
        return [record for record in records if known.isdisjoint(record.formerly)]

    async def lock_letter(self, session: HandlerSession, letter: int) -> Begun | None:
        """Lock a dead letter that is to be tried again; None if it is not there any more, or not to be tried."""
        sign = session.new_sign()
        rows = await session.fetch(self._lock_letter, {"id": letter, "sign": sign})
        return Begun(rows[0][1], sign) if rows else None

    async def has_ended(self, session: HandlerSession, begun: Begun) -> bool:
        """Whether the handler has committed the transaction that was `begun`.

        Raises:
            HandlerMisuse: it cannot be committed any more.
        """
        if session.shows(begun.sign):
            return False
        try:
            [(became, is_ours)] = await session.fetch(self._became, {"id": begun.id})
        except psycopg.errors.InFailedSqlTransaction:
            raise HandlerMisuse(
                "the handler went on after a failed statement: let the error through, or use a savepoint"
            ) from None
        if is_ours:
            return False
        session.distrust()
        if became == "committed":
            return True
        did = "rolled the transaction back" if became == "aborted" else "prepared the transaction"
        raise HandlerMisuse(f"the handler {did} that it was given: leave that to the inbox")

    async def mark(self, session: HandlerSession, begun: Begun, before: int, now: int) -> None:
        """Mark in the transaction how many events have been handled.

        Args:
            session: whose transaction it is.
            begun: what is known of the transaction.
            before: the mark that was set last; 0 for none.
            now: how many events have been handled.

        Raises:
            HandlerMisuse: the last mark is gone.
        """
        [(found, _)] = await session.fetch(self._mark, {"mark": f"{begun.id} {now}"})
        if before and found != f"{begun.id} {before}":
            raise HandlerMisuse("the handler went back to a savepoint that it has not made")

    async def settle(self, session: HandlerSession, begun: Begun | None, fresh: Mapping[str, str]) -> None:
        """See to it that events which have not been handled do not count as handled, now or later.

        If a handler has committed the keys of the `fresh` ones, they are forgotten again; if it has prepared the
        transaction, that is rolled back. If the connection was lost, the server may still be at it: this waits until it
        has ended, as a second try would. Where the database is away, this waits for it a while: nobody else knows of
        the transaction.

        Args:
            session: whose transaction it was.
            begun: what is known of the transaction; None if it had not begun.
            fresh: the idempotency keys of events that were new, each with where it came from.
        """
        if begun is None:
            return
        session.distrust()  # What the handler has done to the session stays if it has committed.
        events: dict[str, object] = {"group": self._group, "keys": [*fresh], "sources": [*fresh.values()]}
        refusals = 0
        while refusals < SETTLE_ATTEMPTS:
            try:
                await session.connect()
                for (roll_back,) in await session.fetch(self._roll_back, {"id": begun.id}):
                    await session.fetch(sql.SQL(roll_back))
                [(became, _)] = await session.fetch(self._became, {"id": begun.id})
                if became == "committed" and fresh:
                    await session.fetch(self._forget, events)
                if became != "in progress":
                    return
            except psycopg.errors.InvalidParameterValue:  # A server that took over does not know the transaction.
                return
            except psycopg.Error as error:
                refusals += 1
                logger.warning("handling waits for Postgres: %s", one_line(error))
            await session.rest(SETTLE_SECONDS)


def _text_array(texts: Iterable[str]) -> str:
    """An array for Postgres, in its own notation: psycopg would look at each element. No text may have a NUL."""
    return '{"' + "\0".join(texts).replace("\\", r"\\").replace('"', r"\"").replace("\0", '","') + '"}'
