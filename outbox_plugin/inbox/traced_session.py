"""A handler session with a span around each run of the handler. It needs the package opentelemetry-api.

The span is current while the handler runs, so what the handler calls and emits belongs to it. It is ended, as of then,
when the outcome of the transaction is known: a run whose transaction was not committed had no effect, and says so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer

from outbox_plugin.core.span_attributes import ERROR_TYPE
from outbox_plugin.inbox.process_span import carriers, process_span, sampled
from outbox_plugin.inbox.session import Events, HandlerSession, Row
from outbox_plugin.observe.span_contexts import child_of, first_valid_context, valid_context
from outbox_plugin.printable import logger_of, one_line

if TYPE_CHECKING:
    from psycopg.sql import SQL, Composed

logger = logger_of("outbox_plugin.inbox")


class _Run(NamedTuple):
    """A run of the handler, whose span is not ended yet."""

    span: Span
    ended: int  # Nanoseconds since 1970.
    failed: bool


class TracedSession:
    """A `HandlerSession` that does everything as `session` does, and traces it."""

    def __init__(
        self, session: HandlerSession, tracer: Tracer, group: str, wall_clock: Callable[[], int] = time.time_ns
    ) -> None:
        """Nothing is connected yet.

        Args:
            session: runs the handler.
            tracer: makes the spans.
            group: the consumer group.
            wall_clock: nanoseconds since 1970.
        """
        self._session = session
        self._tracer = tracer
        self._group = group
        self._wall_clock = wall_clock
        self._runs: list[_Run] = []  # Of the present transaction.

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Return a transaction; at its end, the spans of the handler's runs in it are ended."""
        try:
            async with self._session.transaction():
                yield
        except BaseException as error:
            self._end_spans(error)
            raise
        self._end_spans(None)

    async def handle(self, events: Events) -> None:
        """Run the handler within a span."""
        span = self._start_span(events)
        failed = True
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                await self._session.handle(events)
            failed = False
        except Exception as error:
            _note_error(span, error)
            raise
        finally:
            if span.is_recording():
                self._runs.append(_Run(span, self._wall_clock(), failed))

    def _start_span(self, events: Events) -> Span:
        """The span of a run. An error of the tracer is logged, and harms nothing else."""
        try:
            return self._span_of(events)
        except Exception as error:
            logger.warning("a handler could not be traced: %s", one_line(error))
            return trace.INVALID_SPAN

    def _span_of(self, events: Events) -> Span:
        """A child of the first recorded trace of the events, which links to them all.

        Where none is recorded, no span is made, but the trace goes on. Where no event has a trace, one begins.
        """
        records = events if isinstance(events, list) else [events]
        found = carriers(records)
        linked = [context for each in sampled(found) if (context := valid_context(each)) is not None]
        if not linked and (context := first_valid_context(found)) is not None:
            return trace.NonRecordingSpan(context)
        name, attributes = process_span(events, self._group)
        return self._tracer.start_span(
            name,
            context=child_of(linked[0] if linked else None),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=[Link(context) for context in linked],
        )

    def _end_spans(self, error: BaseException | None) -> None:
        runs, self._runs = self._runs, []
        for span, ended, failed in runs:
            try:
                if error is not None and not failed:
                    span.set_status(StatusCode.ERROR, "the transaction was not committed")
                    span.set_attribute(ERROR_TYPE, type(error).__qualname__)
                span.end(ended)
            except Exception as problem:
                logger.warning("a handler could not be traced: %s", one_line(problem))

    @property
    def lost(self) -> bool:
        """Whether the connection is closed, or was never made."""
        return self._session.lost

    @property
    def may_have_savepoints(self) -> bool:
        """Whether a handler may have made savepoints since the transaction began."""
        return self._session.may_have_savepoints

    async def connect(self) -> None:
        """Make a new connection where that is needed."""
        await self._session.connect()

    async def fetch(self, query: Composed | SQL, values: dict[str, object] | None = None) -> list[Row]:
        """Run a statement, and return its rows, if it has any."""
        return await self._session.fetch(query, values)

    async def rest(self, seconds: float) -> None:
        """Wait for so many seconds."""
        await self._session.rest(seconds)

    def distrust(self) -> None:
        """Have a new connection for the next transaction."""
        self._session.distrust()

    def new_sign(self) -> str:
        """Return a sign for the next transaction."""
        return self._session.new_sign()

    def shows(self, sign: str) -> bool:
        """Whether the connection is in the transaction that has this sign; False if that is not certain."""
        return self._session.shows(sign)

    async def close(self) -> None:
        """Close the connection."""
        await self._session.close()


def _note_error(span: Span, error: Exception) -> None:
    """Say in a run's span what the handler raised. Whatever goes wrong, as in its text, is logged alone."""
    try:
        span.set_attribute(ERROR_TYPE, type(error).__qualname__)
        span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {one_line(error)}")
        span.record_exception(error)
    except Exception as problem:
        logger.warning("a handler could not be traced: %s", one_line(problem))
