"""What the span of a handler's run says, and whose traces it continues. Decides only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from outbox_plugin.core.trace_context import Carrier, carrier, is_sampled
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


def carriers(records: Sequence[Received]) -> Iterator[Carrier]:
    """The trace context of each record that has one, as far as its text shows."""
    for record in records:
        if found := carrier((name, value.decode("ascii", "replace")) for name, value in record.headers if value):
            yield found


def sampled_carriers(records: Sequence[Received]) -> Iterator[Carrier]:
    """The trace contexts of those records whose traces are recorded."""
    return (each for each in carriers(records) if is_sampled(each["traceparent"]))


def _readable_key(record: Received) -> str | None:
    try:
        return record.key_text
    except UnicodeDecodeError:
        return None
