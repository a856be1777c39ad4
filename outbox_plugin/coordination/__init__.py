"""Consumers that share topics through Kafka alone: Marshal's protocol, wire-compatible.

Instances of a group write to a coordination topic which partitions they want, hold and give up. The topic is a log in
one order, so all who read it agree on who holds what. There is no coordinator, and when an instance comes or goes, only
the partitions that move stop. An instance that starts again with its client id goes on with its own claims at once. An
operator pauses a group, sets where it goes on, and resumes it (`admin.py`).

The log decides who holds a partition and where the group goes on in it, by the broker's clock alone
(`partition_owners.py`; what was read of several partitions of the topic: `log_view.py`).
`claims.py`, `claim_planner.py` and `lag_trend.py` decide which partitions an instance asks for, and which it gives up
for the others' fair share. An instance hands out records only of partitions that the log gave it, and only while
nobody else can have them (`member.py`). Positions and pauses that must outlive the log are kept beside it
(`state_topic.py`). None of these modules does I/O; `instance.py` and `consumer.py` are the threads around them.

At least once: an offset moves forward when the records below it are committed. Another instance may get records again.
At most once: an instance writes to the log which records it will hand out, reads that back, and hands them out only if
it held the partition at that point of the log. Records may be lost with an instance, but nobody gets them twice.
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
    from outbox_plugin.coordination.partition_owners import World

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

_HOME = {"Admin": "admin", "Consumer": "consumer", "World": "partition_owners"}  # All other names: messages.


def __getattr__(name: str) -> Any:
    """Import a public name where it lives (PEP 562): the world can be computed without a Kafka client."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'messages')}"), name)
