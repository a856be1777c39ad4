"""OpenTelemetry's tracer, where a program has set one up."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # It need not be installed.
    from opentelemetry.trace import Tracer


def configured_tracer() -> Tracer | None:
    """A tracer of the global tracer provider; None where that makes no spans, or OpenTelemetry is not installed.

    Harvesters and inboxes ask once, when they start: what is set up later is not seen.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    tracer = trace.get_tracer("outbox_plugin", version("outbox-plugin"))
    return None if isinstance(tracer, trace.NoOpTracer | trace.ProxyTracer) else tracer
