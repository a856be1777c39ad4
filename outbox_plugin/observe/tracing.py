"""OpenTelemetry's tracer, where a program has set one up."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from outbox_plugin.printable import logger_of
from outbox_plugin.schema.connection import one_line

if TYPE_CHECKING:  # It need not be installed.
    from opentelemetry.trace import Tracer

logger = logger_of("outbox_plugin.observe")


def configured_tracer() -> Tracer | None:
    """A tracer of the global tracer provider; None where that makes no spans, or OpenTelemetry is not installed.

    Harvesters and inboxes ask once, when they start: what is set up later is not seen.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    try:
        tracer = trace.get_tracer("outbox_plugin", version("outbox-plugin"))
    except Exception as error:  # As where the environment names a tracer provider that is not there.
        logger.warning("nothing is traced: OpenTelemetry gives no tracer: %s", one_line(error))
        return None
    return None if isinstance(tracer, trace.NoOpTracer | trace.ProxyTracer) else tracer
