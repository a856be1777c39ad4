"""OpenTelemetry's SDK with an exporter in memory, in the place of a program's global tracer provider."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import SpanContext, Tracer

BEGIN_NO_TRACE = ParentBased(TraceIdRatioBased(0.0))  # The sampler of a program that begins no trace by itself.


class Exported:
    """A tracer provider, and the spans that it has exported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sampler: Sampler = BEGIN_NO_TRACE) -> None:
        """`monkeypatch` makes the provider the global one until the test ends: it can be set only once in a process."""
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """All spans that have ended, in the order of their ends."""
        return self._exporter.get_finished_spans()

    def of(self, operation: str) -> list[ReadableSpan]:
        """The spans of one operation: `wait`, `send` or `process`."""
        return [span for span in self.spans if span.name.split(" ")[0] == operation]


def recorded_tracer() -> Tracer:
    """The tracer of an application that records every trace; its spans are exported nowhere."""
    return TracerProvider().get_tracer("application")


def context_of(span: ReadableSpan) -> SpanContext:
    """The span's own context."""
    context = span.get_span_context()
    assert context is not None
    return context


def parent_of(span: ReadableSpan) -> int | None:
    """The id of the span's parent."""
    return None if span.parent is None else span.parent.span_id


def linked(span: ReadableSpan) -> list[int]:
    """The ids of the spans that the span links to."""
    return [link.context.span_id for link in span.links]


def traceparent(trace_id: int, span_id: int, *, sampled: bool = True) -> str:
    """The header of that span."""
    return f"00-{trace_id:032x}-{span_id:016x}-0{int(sampled)}"
