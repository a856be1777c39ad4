"""The outbox in Dagster: resources that name it, a sensor that keeps its harvester alive, checks that prove it drained.

The names below are imported on first use: the harvester's daemon is started from this package, and loads no Dagster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_plugin.dagster.checks import build_outbox_checks
    from outbox_plugin.dagster.resources import HarvesterResource, OutboxResource
    from outbox_plugin.dagster.sensor import build_harvester_sensor

__all__ = ["HarvesterResource", "OutboxResource", "build_harvester_sensor", "build_outbox_checks"]

_HOME = {
    "HarvesterResource": "outbox_plugin.dagster.resources",
    "OutboxResource": "outbox_plugin.dagster.resources",
    "build_harvester_sensor": "outbox_plugin.dagster.sensor",
    "build_outbox_checks": "outbox_plugin.dagster.checks",
}


def __getattr__(name: str) -> Any:
    """Import a public name where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
