"""From records to transactions to outcomes: together while all is well, one by one where it is not.

Written once, for sync and async handlers: a `Seat` is a connection and the handler that works on it. A seat on a sync
connection never suspends, so that a plain thread can drive it (`driven`).
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from outbox_plugin.errors import HandlerMisuse
from outbox_plugin.inbox.lanes import Outcome, Slice
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Retry, counts_against_the_record
from outbox_plugin.schema.connection import connect, connect_async, one_line
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from psycopg.sql import Composed

logger = logging.getLogger("outbox_plugin.inbox")

Handler = Callable[[psycopg.Connection[Any], Received], None]
AsyncHandler = Callable[[psycopg.AsyncConnection[Any], Received], Awaitable[None]]
Row = tuple[Any, ...]
T = TypeVar("T")
MOST_ERROR_CHARACTERS = 4_000
AWAY_SECONDS = 0.5


class Seat(Protocol):
    """A connection, and the handler that works on it."""

    @property
    def lost(self) -> bool:
        """Whether the connection is no more."""
        ...

    async def connect(self) -> None:
        """Make a new connection where there is none that works."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[None]:
        """A transaction: committed at its end, undone on an exception."""
        ...

    async def fetch(self, query: Composed, values: dict[str, object]) -> list[Row]:
        """Run a statement that returns rows."""
        ...

    async def handle(self, record: Received) -> None:
        """Run the handler.

        Raises:
            HandlerMisuse: it left the transaction in a state in which it cannot be committed with what is ours.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class ThreadSeat:
    """A seat of a thread's own."""

    def __init__(self, settings: Settings, handler: Handler) -> None:
        self._settings = settings
        self._handler = handler
        self._connection: psycopg.Connection[Any] | None = None

    @property
    def lost(self) -> bool:
        """See `Seat.lost`."""
        return self._connection is None or self._connection.closed

    async def connect(self) -> None:
        """See `Seat.connect`."""
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._settings, purpose="outbox inbox")

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """See `Seat.transaction`."""
        assert self._connection is not None  # noqa: S101 - `connect` comes first.
        with self._connection.transaction():
            yield

    async def fetch(self, query: Composed, values: dict[str, object]) -> list[Row]:
        """See `Seat.fetch`."""
        assert self._connection is not None  # noqa: S101
        return self._connection.execute(query, values).fetchall()

    async def handle(self, record: Received) -> None:
        """See `Seat.handle`."""
        assert self._connection is not None  # noqa: S101
        self._handler(self._connection, record)
        _check_it_can_commit(self._connection)

    async def close(self) -> None:
        """See `Seat.close`."""
        if self._connection is not None:
            self._connection.close()


class TaskSeat:
    """A seat of an asyncio task's own."""

    def __init__(self, settings: Settings, handler: AsyncHandler) -> None:
        self._settings = settings
        self._handler = handler
        self._connection: psycopg.AsyncConnection[Any] | None = None

    @property
    def lost(self) -> bool:
        """See `Seat.lost`."""
        return self._connection is None or self._connection.closed

    async def connect(self) -> None:
        """See `Seat.connect`."""
        if self._connection is None or self._connection.closed:
            self._connection = await connect_async(self._settings, purpose="outbox inbox")

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """See `Seat.transaction`."""
        assert self._connection is not None  # noqa: S101
        async with self._connection.transaction():
            yield

    async def fetch(self, query: Composed, values: dict[str, object]) -> list[Row]:
        """See `Seat.fetch`."""
        assert self._connection is not None  # noqa: S101
        return await (await self._connection.execute(query, values)).fetchall()

    async def handle(self, record: Received) -> None:
        """See `Seat.handle`."""
        assert self._connection is not None  # noqa: S101
        await self._handler(self._connection, record)
        _check_it_can_commit(self._connection)

    async def close(self) -> None:
        """See `Seat.close`."""
        if self._connection is not None:
            await self._connection.close()


class TransactionEnded(HandlerMisuse):
    """The handler ended the transaction that it was given."""


def _check_it_can_commit(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """A COMMIT after a failed statement undoes everything, and Postgres does not call that an error."""
    status = connection.pgconn.transaction_status
    if status == TransactionStatus.INERROR:
        raise HandlerMisuse("the handler went on after a failed statement: let the error through, or use a savepoint")
    if status != TransactionStatus.INTRANS:
        raise TransactionEnded("the handler ended the transaction that it was given: leave that to the inbox")


def driven(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a coroutine that was to run through has suspended")


class Handling:
    """Carries out slices of lanes for one consumer group."""

    def __init__(self, settings: Settings, group: str, retry: Retry, jitter: Callable[[], float]) -> None:
        self._group = group
        self._retry = retry
        self._jitter = jitter
        self._claim, self._unclaim, self._bury, self._bury_again, self._lock_letter, self._remove_letter = (
            statement("inbox", name, settings.table)
            for name in ("claim", "unclaim", "bury", "bury_again", "lock_letter", "remove_letter")
        )

    async def handle(self, seat: Seat, slices: list[Slice]) -> tuple[list[Outcome], bool]:
        """What became of each slice, and whether they were done together but had to be undone.

        Together means in one transaction; a failure undoes it, and each record has a transaction of its own.
        """
        undone = False
        if not await self._connected(seat):
            return [self._when_back() for _ in slices], False
        if sum(len(each.records) for each in slices) > 1 and not _has_letters(slices):
            try:
                await self._handle_together(seat, [record for each in slices for record in each.records])
            except Exception as error:
                undone = True
                logger.debug("handled together, and undone: %s", one_line(error))
            else:
                return [Outcome(len(each.records)) for each in slices], False
        return [await self._handle_slice(seat, each) for each in slices], undone

    async def _connected(self, seat: Seat) -> bool:
        try:
            await seat.connect()
        except psycopg.Error as error:
            logger.warning("handling waits for Postgres: %s", one_line(error))
            return False
        return True

    def _when_back(self, done: int = 0) -> Outcome:
        return Outcome(done, again_in=AWAY_SECONDS * (1 + self._jitter()))

    async def _handle_together(self, seat: Seat, records: Sequence[Received]) -> None:
        fresh: set[str] = set()
        try:
            async with seat.transaction():
                fresh = await self._claimed(seat, [record.idempotency_key for record in records])
                for record in records:
                    if record.idempotency_key in fresh:
                        fresh.discard(record.idempotency_key)  # It may stand in the topic twice.
                        await seat.handle(record)
        except TransactionEnded as misuse:
            logger.error("%s: %s", _place(record), misuse)
            await seat.fetch(self._unclaim, {"group": self._group, "keys": [*fresh]})  # Committed, and not handled.
            raise

    async def _handle_slice(self, seat: Seat, taken: Slice) -> Outcome:
        failures = taken.failures
        for done, record in enumerate(taken.records):
            if seat.lost and not await self._connected(seat):
                return self._when_back(done)
            try:
                await self._handle_one(seat, record)
            except TransactionEnded as misuse:
                logger.error("%s: %s; what it did until then stays, and counts as handled", _place(record), misuse)
            except Exception as error:
                counted = counts_against_the_record(getattr(error, "sqlstate", None), connection_lost=seat.lost)
                failures += counted
                if counted and self._retry.is_spent(failures) and await self._buried(seat, record, error, failures):
                    failures = 0
                    continue
                wait = self._retry.wait(max(failures, 1), self._jitter())
                logger.warning("%s failed, and is tried again in %.1f s: %s", _place(record), wait, one_line(error))
                return Outcome(done, again_in=wait, counted=counted)
            failures = 0
        return Outcome(len(taken.records))

    async def _handle_one(self, seat: Seat, record: Received) -> None:
        async with seat.transaction():
            if record.dead_letter is None:
                if await self._claimed(seat, [record.idempotency_key]):
                    await seat.handle(record)
            elif await seat.fetch(self._lock_letter, {"id": record.dead_letter}):
                await seat.handle(record)
                await seat.fetch(self._remove_letter, {"id": record.dead_letter})

    async def _claimed(self, seat: Seat, keys: list[str]) -> set[str]:
        return {key for (key,) in await seat.fetch(self._claim, {"group": self._group, "keys": keys})}

    async def _buried(self, seat: Seat, record: Received, error: Exception, attempts: int) -> bool:
        """Lay a record among the dead letters; False when the database does not let us now."""
        said = "".join(traceback.format_exception(error))[-MOST_ERROR_CHARACTERS:].replace("\0", "")
        reason: dict[str, object] = {"error": said, "attempts": attempts}
        try:
            async with seat.transaction():
                if record.dead_letter is not None:
                    await seat.fetch(self._bury_again, {"id": record.dead_letter, **reason})
                else:
                    await seat.fetch(self._bury, {"group": self._group, **_columns(record), **reason})
        except psycopg.Error as refusal:
            logger.error("%s could not be laid among the dead letters: %s", _place(record), one_line(refusal))
            return False
        logger.error("%s is a dead letter after %d attempts: %s", _place(record), attempts, one_line(error))
        return True


def _has_letters(slices: list[Slice]) -> bool:
    return any(record.dead_letter is not None for each in slices for record in each.records)


def _place(record: Received) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"


def _columns(record: Received) -> dict[str, object]:
    return {
        "idempotency_key": record.idempotency_key,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": record.key,
        "value": record.value,
        "header_keys": [name for name, _ in record.headers],
        "header_values": [value for _, value in record.headers],
    }
