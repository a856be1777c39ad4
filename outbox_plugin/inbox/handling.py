"""Handles key batches: all in one transaction while nothing fails, one by one after a failure.

Written once, for sync and async handlers: see `session`. A session on a sync connection never suspends, so that a plain
thread can drive it (`driven`).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

import psycopg

from outbox_plugin.errors import HandlerMisuse, OutboxError
from outbox_plugin.inbox.events import (
    Observer,
    RecordDeadLettered,
    RecordFailed,
    RecordsDone,
    TakenHandled,
    ignore,
)
from outbox_plugin.inbox.halving import Halves
from outbox_plugin.inbox.handled_keys import HandledKeys
from outbox_plugin.inbox.key_queues import HandlingResult, KeyBatch, Outcome
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Failures, Fault, Retry, fault_of, sqlstate_of
from outbox_plugin.inbox.session import HandlerEndedTransaction, HandlerSession
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.watched_connection import NoAnswer

logger = logger_of("outbox_plugin.inbox")

MAX_ERROR_CHARACTERS = 4_000
AWAY_SECONDS = 0.5
_DEADLOCK = "40P01"
_ENDED = "the handler ended the transaction that it was given: leave that to the inbox"


class _LostWhileHandled(Exception):
    """The connection was lost after the handler had begun."""


class UnreadableHeaders(OutboxError):
    """The name of a header is not UTF-8, so it is not known which event the record is."""


class _NotRecorded(Exception):
    """The event could not be recorded. Its handler has not begun, so this does not count as an attempt."""


class Handling:
    """Handles key batches for one consumer group."""

    def __init__(
        self,
        table: str,
        group: str,
        retry: Retry,
        jitter: Callable[[], float],
        *,
        in_batches: bool = False,
        observe: Observer = ignore,
    ) -> None:
        """Nothing is connected yet.

        Args:
            table: the outbox with its schema: a handler may change the search_path.
            group: the consumer group.
            retry: how often a failing record is tried, and how long it waits between.
            jitter: returns a random number from 0 to 1.
            in_batches: the handler takes a list of events, in their keys' order.
            observe: is called, from the workers, with what happens.
        """
        self._observe = observe
        self._group = group
        self._in_batches = in_batches
        self._retry = retry
        self._jitter = jitter
        self._handled_keys = HandledKeys(table, group)
        self._dead_letter, self._dead_letter_again, self._remove_letter = (
            statement("inbox", name, table) for name in ("dead_letter", "dead_letter_again", "remove_letter")
        )

    async def handle(self, session: HandlerSession, batches: list[KeyBatch]) -> HandlingResult:
        """Handle key batches, and return what became of them.

        All of them are handled in one transaction. If it fails, each record gets a transaction of its own; for a
        handler that takes lists, each half of them does, and so on.
        """
        began = time.monotonic()
        result = await self._handle(session, batches)
        self._observe(TakenHandled(time.monotonic() - began))
        return result

    async def _handle(self, session: HandlerSession, batches: list[KeyBatch]) -> HandlingResult:
        rolled_back = deadlock = False
        if not await self._connected(session):
            return HandlingResult([self._when_back() for _ in batches])
        if self._in_batches:
            return await self._handle_halved(session, batches)
        if sum(len(each.records) for each in batches) > 1 and not _goes_alone(batches):
            records = [record for each in batches for record in each.records]
            try:
                skipped = await self._handle_together(session, records)
            except Exception as error:
                rolled_back, deadlock = True, sqlstate_of(error) == _DEADLOCK
                logger.debug("handled together, and undone: %s", one_line(error))
            else:
                self._observe(RecordsDone(records, skipped))
                return HandlingResult([Outcome(len(each.records)) for each in batches])
        return HandlingResult([await self._handle_key_batch(session, each) for each in batches], rolled_back, deadlock)

    async def _connected(self, session: HandlerSession) -> bool:
        try:
            await session.connect()
        except psycopg.Error as error:
            logger.warning("handling waits for Postgres: %s", one_line(error))
            return False
        return True

    def _when_back(self, done: int = 0) -> Outcome:
        return Outcome(done, again_in=AWAY_SECONDS * (1 + self._jitter()))

    async def _handle_together(self, session: HandlerSession, records: Sequence[Received]) -> list[Received]:
        """Handle records in one transaction. Returns those that had been handled before."""
        skipped: list[Received] = []
        fresh: dict[str, str] = {}
        begun, marked = None, 0
        ended_by: Received | None = None  # The record whose handler has committed the transaction.
        try:
            async with session.transaction():
                fresh, begun = await self._handled_keys.record(session, records)
                for number, record in enumerate(records, 1):
                    if begun is None or record.idempotency_key not in fresh:
                        skipped.append(record)
                        continue
                    await session.handle(record)
                    has_ended = await self._handled_keys.has_ended(session, begun)
                    fresh.pop(record.idempotency_key, None)  # The topic may hold the event twice.
                    if has_ended:
                        ended_by = record
                        break
                    if session.may_have_savepoints:
                        await self._handled_keys.mark(session, begun, marked, number)
                        marked = number
        except Exception:
            await self._handled_keys.settle(session, begun, fresh)
            raise
        if ended_by is None:
            return skipped
        await self._handled_keys.settle(session, begun, fresh)
        _log_ended_by(ended_by)
        raise HandlerEndedTransaction(_ENDED)

    async def _handle_halved(self, session: HandlerSession, batches: list[KeyBatch]) -> HandlingResult:
        """Pass all records to the handler at once; after a failure each half, until the guilty record is alone.

        Records that have failed before, and dead letters, are passed alone.
        """
        halves = Halves(batches, lambda each: bool(each.failures.total or _goes_alone([each])))
        while part := halves.next():
            if session.lost and not await self._connected(session):
                halves.away(self._when_back)
            elif len(part) == 1:
                halves.single(await self._handle_key_batch(session, halves.as_key_batch(part[0])))
            else:
                records = [record for _, record in part]
                try:
                    skipped = await self._handle_batch(session, records)
                except Exception as error:
                    logger.debug("%d events handled together, and undone: %s", len(part), one_line(error))
                    session.distrust()
                    halves.failed(deadlock=sqlstate_of(error) == _DEADLOCK)
                else:
                    self._observe(RecordsDone(records, skipped))
                    halves.done()
        return HandlingResult(halves.outcomes(), halves.rolled_back, halves.deadlock)

    async def _handle_batch(self, session: HandlerSession, records: Sequence[Received]) -> list[Received]:
        """Pass records to the handler in one transaction. Returns those that had been handled before."""
        passed: list[Received] = []
        fresh: dict[str, str] = {}
        begun, committed = None, False
        try:
            async with session.transaction():
                fresh, begun = await self._handled_keys.record(session, records)
                if begun is not None:
                    first = {record.idempotency_key: record for record in reversed(records)}
                    kept = [each for each in records if each.idempotency_key in fresh]
                    passed = [each for each in kept if first[each.idempotency_key] is each]
                    await session.handle([*passed])
                    committed = await self._handled_keys.has_ended(session, begun)
                    fresh.clear()
        except Exception:
            await self._handled_keys.settle(session, begun, fresh)
            raise
        if committed:
            _log_ended_by(records[0])
        if len(passed) == len(records):
            return []
        handled = {id(each) for each in passed}
        return [each for each in records if id(each) not in handled]

    async def _handle_key_batch(self, session: HandlerSession, taken: KeyBatch) -> Outcome:
        failures = taken.failures
        for done, record in enumerate(taken.records):
            if session.lost and not await self._connected(session):
                return self._when_back(done)
            skipped: list[Received] = []
            try:
                if not await self._handle_one(session, record):
                    skipped.append(record)
            except HandlerEndedTransaction:
                _log_ended_by(record)
            except Exception as error:
                fault, cause = _blamed(error, session_lost=session.lost)
                failures = failures.plus(fault)
                session.distrust()
                spent = fault is not Fault.NOBODY and self._retry.is_spent(failures)
                spent = spent or isinstance(cause, UnreadableHeaders)
                if spent and await self._dead_lettered(session, record, cause, failures.total):
                    self._observe(RecordDeadLettered(record))
                    failures = Failures()
                    continue
                wait = self._retry.wait(max(*failures, 1), self._jitter())
                logger.warning("%s failed, and is tried again in %.1f s: %s", _location(record), wait, one_line(cause))
                self._observe(RecordFailed(record))
                return Outcome(done, again_in=wait, fault=fault)
            self._observe(RecordsDone([record], skipped))
            failures = Failures()
        return Outcome(len(taken.records))

    async def _handle_one(self, session: HandlerSession, record: Received) -> bool:
        """Handle a record in a transaction of its own. Returns False if it had been handled before.

        Raises:
            HandlerEndedTransaction: the handler committed the transaction; what it did is there.
            _LostWhileHandled: the connection was lost since the handler began.
            _NotRecorded: the handler has not begun.
            UnreadableHeaders: it must not be handled.
        """
        if record.unreadable_headers:
            raise UnreadableHeaders("the name of a header is not UTF-8: the record is kept without its headers")
        fresh: dict[str, str] = {}
        begun, committed = None, False
        try:
            async with session.transaction():
                if record.dead_letter is None:
                    fresh, begun = await self._handled_keys.record(session, [record])
                else:
                    begun = await self._handled_keys.lock_letter(session, record.dead_letter)
                if begun is not None:
                    await session.handle([record] if self._in_batches else record)
                    committed = await self._handled_keys.has_ended(session, begun)
                    fresh.clear()
                    if record.dead_letter is not None:
                        removed = await session.fetch(self._remove_letter, {"id": record.dead_letter})
                        if not (removed or committed):
                            raise HandlerMisuse("the dead letter was locked, and the handler has removed it")
        except Exception as error:
            if begun is None:
                raise _NotRecorded from error
            # A server that does not answer in time is busy or away. That does not count, however often it happens.
            lost = session.lost and not isinstance(error, HandlerMisuse | NoAnswer)
            await self._handled_keys.settle(session, begun, fresh)
            if lost:
                raise _LostWhileHandled from error
            raise
        if committed:
            raise HandlerEndedTransaction(_ENDED)
        return begun is not None

    async def _dead_lettered(self, session: HandlerSession, record: Received, error: Exception, attempts: int) -> bool:
        """Dead-letter a record. Returns False if the database does not let us now."""
        said = "".join(traceback.format_exception(error))[-MAX_ERROR_CHARACTERS:].replace("\0", "")
        said = said.encode(errors="backslashreplace").decode()  # Postgres refuses half a surrogate pair.
        reason: dict[str, object] = {"error": said, "attempts": attempts}
        try:
            await session.connect()
            async with session.transaction():
                if record.dead_letter is not None:
                    await session.fetch(self._dead_letter_again, {"id": record.dead_letter, **reason})
                else:
                    await session.fetch(self._dead_letter, {"group": self._group, **_columns(record), **reason})
        except psycopg.Error as refusal:
            logger.error("%s could not be dead-lettered: %s", _location(record), one_line(refusal))
            return False
        logger.error("%s is a dead letter after %d attempts: %s", _location(record), attempts, one_line(error))
        return True


def _log_ended_by(record: Received) -> None:
    logger.error("%s: %s; what it did stays, and counts as handled", _location(record), _ENDED)


def _blamed(error: Exception, *, session_lost: bool) -> tuple[Fault, Exception]:
    """Return whose fault it is that a record failed, and the error that says why."""
    if isinstance(error, _LostWhileHandled | _NotRecorded):
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return Fault.LOST if isinstance(error, _LostWhileHandled) else Fault.NOBODY, cause
    if isinstance(error, HandlerMisuse):
        return Fault.RECORD, error
    if session_lost or isinstance(error, NoAnswer):
        return Fault.NOBODY, error
    return fault_of(sqlstate_of(error)), error


def _goes_alone(batches: list[KeyBatch]) -> bool:
    """Whether a record must have a transaction of its own: it is a dead letter, or becomes one at once."""
    for each in batches:
        for record in each.records:
            if record.dead_letter is not None or record.unreadable_headers:
                return True
    return False


def _location(record: Received) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"


def _columns(record: Received) -> dict[str, object]:
    return {
        "idempotency_key": record.idempotency_key,
        "source": record.source,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": record.key,
        "value": record.value,
        "header_keys": [name for name, _ in record.headers],
        "header_values": [value for _, value in record.headers],
    }
