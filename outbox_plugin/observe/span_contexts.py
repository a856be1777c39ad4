"""Reads the trace context of records with OpenTelemetry's propagator. Requires the package opentelemetry-api."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outbox_plugin.core.trace_context import Carrier

_PROPAGATOR = TraceContextTextMapPropagator()


def valid_context(carrier: Carrier) -> SpanContext | None:
    """The span that `carrier` names; None if its `traceparent` is missing or invalid."""
    if not carrier:
        return None
    found = trace.get_current_span(_PROPAGATOR.extract(carrier, Context())).get_span_context()
    return found if found.is_valid else None


def first_valid_context(carriers: Iterable[Carrier]) -> SpanContext | None:
    """The span that the first of `carriers` with a valid `traceparent` names; None if none has one."""
    return next((context for each in carriers if (context := valid_context(each)) is not None), None)


def child_of(parent: SpanContext | None) -> Context:
    """A context in which a new span is a child of `parent`; without a parent, it begins a trace."""
    return Context() if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())
