"""What the span of a handler's run says, and whose traces it continues. Decides only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from outbox_plugin.core.span_attributes import (
    BATCH_MESSAGE_COUNT,
    CONSUMER_GROUP,
    OFFSET,
    PARTITION_ID,
    Attributes,
    operation_attributes,
    record_attributes,
    span_name,
)
from outbox_plugin.core.trace_context import CONTEXT_HEADERS, MAX_LINKS, TRACEPARENT, Carrier, carrier, is_sampled
from outbox_plugin.inbox.received import Received


def process_span(events: Received | list[Received], group: str) -> tuple[str, Attributes]:
    """The name and the attributes of the span; of a list, only what all of its events have in common."""
    records = events if isinstance(events, list) else [events]
    topics = {record.topic for record in records}
    said = {**operation_attributes("process", topics), CONSUMER_GROUP: group}
    partitions = {(record.topic, record.partition) for record in records}
    if len(partitions) == 1:
        said[PARTITION_ID] = str(records[0].partition)
    if isinstance(events, list):
        said[BATCH_MESSAGE_COUNT] = len(events)
    else:
        said |= {OFFSET: events.offset, **record_attributes(_readable_key(events), is_tombstone=events.value is None)}
    return span_name("process", topics), said


def carriers(records: Sequence[Received]) -> list[Carrier]:
    """The trace context of each record that has one, as far as its text shows."""
    found = [
        carrier(
            [
                (name, value.decode("ascii", "replace"))
                for name, value in each.headers
                if value and name in CONTEXT_HEADERS
            ]
        )
        for each in records
    ]
    return [each for each in found if each]


def sampled(found: Sequence[Carrier]) -> list[Carrier]:
    """Those whose traces are recorded, as many as a span links to."""
    return list(islice((each for each in found if is_sampled(each[TRACEPARENT])), MAX_LINKS))


def _readable_key(record: Received) -> str | None:
    try:
        return record.key_text
    except UnicodeDecodeError:
        return None
