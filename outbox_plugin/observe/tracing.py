"""Finds OpenTelemetry's tracer, if the program has configured one."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from outbox_plugin.printable import logger_of, one_line

if TYPE_CHECKING:  # OpenTelemetry may not be installed.
    from opentelemetry.trace import Tracer

logger = logger_of("outbox_plugin.observe")


def configured_tracer() -> Tracer | None:
    """A tracer of the global tracer provider; None if that records no spans, or OpenTelemetry is not installed.

    Harvesters and inboxes call it once, at their start: a provider that is configured later has no effect.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    try:
        tracer = trace.get_tracer("outbox_plugin", _version())
    except Exception as error:  # For example, the environment names a tracer provider that is not installed.
        logger.warning("nothing is traced: OpenTelemetry could not provide a tracer: %s", one_line(error))
        return None
    return None if isinstance(tracer, trace.NoOpTracer | trace.ProxyTracer) else tracer


@cache
def _version() -> str:
    """The version of this package. Looking it up reads files, and a process may harvest hundreds of outboxes."""
    return version("outbox-plugin")
