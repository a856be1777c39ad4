"""A transactional outbox for Postgres and Kafka: write side, relay and settings.

The names below are imported on first use, so that a Spark worker which only writes rows loads no Kafka client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_plugin.emit.event import Event
    from outbox_plugin.emit.outbox import Outbox
    from outbox_plugin.harvester import Harvester
    from outbox_plugin.settings import Settings

__all__ = ["Event", "Harvester", "Outbox", "Settings"]

_HOME = {
    "Event": "outbox_plugin.emit.event",
    "Harvester": "outbox_plugin.harvester",
    "Outbox": "outbox_plugin.emit.outbox",
    "Settings": "outbox_plugin.settings",
}


def __getattr__(name: str) -> Any:
    """Import a public name where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
