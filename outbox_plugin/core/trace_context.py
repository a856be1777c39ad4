"""Which records belong to a trace that is recorded, and from when to when a row waited.

Rules, for records and rows that carry W3C trace context in their headers:

- Whoever emits decides whether a trace is recorded; the flags of `traceparent` say so. A record of a trace that is not
  recorded makes no span.
- What handles many records at once makes one span, which links to the traces of at most `MAX_LINKS` of them. It is in
  the first one's trace: without a parent, the sampler would have to choose the span again.
- A `traceparent` that cannot be right counts as none.

This file decides by the text alone, in a fraction of a microsecond. The OpenTelemetry library reads only the records
that remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outbox_plugin.core.row import POSTGRES_EPOCH_MICROS, OutboxRow, fields_of

TRACEPARENT = "traceparent"
CONTEXT_HEADERS = frozenset((TRACEPARENT, "tracestate"))
MAX_LINKS = 128  # The SDK's default OTEL_SPAN_LINK_COUNT_LIMIT. It bounds what a window of 10,000 rows can cost.
_LENGTH = 55  # Of 00-<32 digits>-<16 digits>-<2 digits>; later versions may add to it.
_MAX_LENGTH = 255  # The OpenTelemetry library logs a warning for a longer one.
_ODD_DIGITS = frozenset("13579bdf")  # The last digit of the flags: its lowest bit says that the trace is recorded.
_NAMES, _TEXTS = OutboxRow._fields.index("header_keys"), OutboxRow._fields.index("header_values")

Carrier = Mapping[str, str]  # The headers `traceparent` and `tracestate`, as OpenTelemetry's propagator takes them.


def is_sampled(traceparent: str) -> bool:
    """Whether a `traceparent` says that its trace is recorded; False for one that is too short."""
    return traceparent[_LENGTH - 1 : _LENGTH] in _ODD_DIGITS


def carrier(headers: Iterable[tuple[str, str]]) -> Carrier:
    """The headers of W3C trace context; none where `traceparent` is missing or has a length that none can have."""
    found = {name: text for name, text in headers if name in CONTEXT_HEADERS and isinstance(text, str)}
    return found if _LENGTH <= len(found.get(TRACEPARENT, "")) <= _MAX_LENGTH else {}


def sampled_rows(rows: Sequence[OutboxRow], limit: int) -> list[OutboxRow]:
    """The first rows, at most `limit`, whose traces are recorded.

    It looks at each row of a window, so it makes no object for a row whose trace is not recorded.
    """
    sampled: list[OutboxRow] = []
    for fields in fields_of(rows):
        names = fields[_NAMES]
        if TRACEPARENT in names:
            text = fields[_TEXTS][names.index(TRACEPARENT)]
            if text is not None and is_sampled(text):
                sampled.append(OutboxRow(*fields))
                if len(sampled) == limit:
                    break
    return sampled


def row_carrier(row: OutboxRow) -> Carrier:
    """The trace context of a row."""
    return carrier(zip(row.header_keys, row.header_values, strict=False))


def wait_began(create_time: int, ended: int) -> int:
    """When a row's wait began, in nanoseconds since 1970.

    Args:
        create_time: the row's, in microseconds since Postgres' epoch.
        ended: when the wait ended, in nanoseconds since 1970. It is returned where the row has no creation time that a
            span can have: one before 1970, or one after `ended`, as the clocks of two machines differ.
    """
    began = (create_time + POSTGRES_EPOCH_MICROS) * 1_000
    return began if 0 <= began <= ended else ended
