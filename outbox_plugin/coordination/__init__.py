"""Consumers that share topics through Kafka alone: Marshal's protocol, wire-compatible.

Instances of a group write what they want, hold and give up to a coordination topic. The log orders it, so that all
who read it agree on who holds what (`world.py`): nobody coordinates, and nothing stops when an instance comes or goes
but the partitions that move. An instance that starts again with its client id goes on with its own claims at once. An
operator pauses a group, sets where it goes on, and resumes it (`admin.py`).

Who decides what: the log decides who holds a partition, and where it goes on, by the broker's clock alone
(`world.py`); `claims.py`, `spread.py` and `lag_trend.py` decide what an instance asks for, and what it gives up so
that others have their share. An instance's own memory decides nothing that the log has not said: it hands out records
only of partitions that the log gave it, and only while nobody else can have them (`member.py`). What must outlive the
log is kept beside it (`state.py`). All of these do no I/O; `instance.py` and `consumer.py` are the threads around
them.

At least once: an offset moves forward when what is below it was committed; records may come again, to another. At
most once: an instance first writes to the log what it is about to hand out, reads that back, and hands it out only if
it held the partition there; records may be lost with an instance, and come twice to nobody.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox_plugin.coordination.admin import Admin
    from outbox_plugin.coordination.consumer import Consumer
    from outbox_plugin.coordination.messages import (
        ClaimingMessages,
        ClaimingPartition,
        Heartbeat,
        MalformedMessage,
        ReleaseGroup,
        ReleasingPartition,
        decode,
        encode,
    )
    from outbox_plugin.coordination.world import World

__all__ = [
    "Admin",
    "ClaimingMessages",
    "ClaimingPartition",
    "Consumer",
    "Heartbeat",
    "MalformedMessage",
    "ReleaseGroup",
    "ReleasingPartition",
    "World",
    "decode",
    "encode",
]

_HOME = {"Admin": "admin", "Consumer": "consumer", "World": "world"}  # All others: messages.


def __getattr__(name: str) -> Any:
    """Import a public name where it lives (PEP 562): the world can be computed without a Kafka client."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'messages')}"), name)
