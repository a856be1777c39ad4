"""Spark's side of the outbox: business rows and events, written by many tasks, appear in one transaction or not at all.

Tasks copy their rows into staging tables, each under an attempt id of its own. Spark hands the driver the ids of the
attempts that it accepted: one per partition, even if tasks were retried or ran speculatively. The driver then moves the
rows of exactly those attempts, business rows and events together, in one transaction that also records the job's id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox_plugin.extras import hinted

if TYPE_CHECKING:
    from outbox_plugin.verification.on_spark import verify

try:
    from outbox_plugin.spark.sink import register
    from outbox_plugin.spark.write import JobCommitted, OutboxWrite
except ModuleNotFoundError as error:
    raise hinted(__name__, error) from None

__all__ = ["JobCommitted", "OutboxWrite", "register", "verify"]


def __getattr__(name: str) -> Any:
    """Import `verify` on first use (PEP 562): the package `verification` imports this one, so this one cannot."""
    if name != "verify":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outbox_plugin.verification.on_spark import verify

    return verify
