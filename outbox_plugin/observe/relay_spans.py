"""Spans of the relay: how long a traced event waited in the outbox, and the transaction that published it.

They are made once a window is committed or, in at-least-once delivery, acknowledged. So a transaction that was aborted,
or whose outcome is unknown, has no spans, and one that is retried has them once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.trace import Link, SpanKind, Tracer

from outbox_plugin.core.row import OutboxRow, is_tombstone, topics_of
from outbox_plugin.core.span_attributes import BATCH_MESSAGE_COUNT, operation_attributes, record_attributes, span_name
from outbox_plugin.core.trace_context import MAX_LINKS, row_carrier, sampled_rows, wait_began
from outbox_plugin.observe.span_contexts import child_of, valid_context
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.relay.events import HarvestEvent, WindowPublished

logger = logger_of("outbox_plugin.harvester")


class RelaySpans:
    """Makes the spans of one harvester."""

    def __init__(self, tracer: Tracer, wall_clock: Callable[[], int] = time.time_ns) -> None:
        """Make the maker of spans.

        Args:
            tracer: creates the spans.
            wall_clock: returns the time in nanoseconds since 1970.
        """
        self._tracer = tracer
        self._wall_clock = wall_clock

    def observe(self, event: HarvestEvent) -> None:
        """Make the spans of a published window. An error of the tracer is logged, and has no other effect."""
        if isinstance(event, WindowPublished) and event.rows:
            try:
                self._trace(event)
            except Exception as error:
                logger.warning("shard %d: a window could not be traced: %s", event.shard, one_line(error))

    def _trace(self, window: WindowPublished) -> None:
        rows = sampled_rows(window.records, MAX_LINKS)
        traced = [(row, context) for row in rows if (context := valid_context(row_carrier(row))) is not None]
        if not traced:
            return
        ended = self._wall_clock()
        began = ended - int(window.sending_seconds * 1e9)
        topics = topics_of(window.records)
        send = self._tracer.start_span(
            span_name("send", topics),
            context=child_of(traced[0][1]),
            kind=SpanKind.CLIENT,  # Not PRODUCER, which is for a span whose context the record carries.
            attributes={**operation_attributes("send", topics), BATCH_MESSAGE_COUNT: window.rows},
            links=[Link(context) for _, context in traced],
            start_time=began,
        )
        send.end(ended)
        for row, context in traced:
            wait = self._tracer.start_span(
                span_name("wait", [row.topic]),
                context=child_of(context),
                attributes=_of_row(row),
                links=[Link(send.get_span_context())],
                start_time=wait_began(row.create_time, began),
            )
            wait.end(began)


def _of_row(row: OutboxRow) -> dict[str, str | int | bool]:
    attributes = record_attributes(row.key, is_tombstone=is_tombstone(row))
    return {**operation_attributes("wait", [row.topic]), **attributes}
