"""Which partition of a topic of Kafka's own keeps the state of a group or of a transactional id.

The leader of that partition is the coordinator. While the partition takes no records, there is no coordinator.
"""

from __future__ import annotations

TRANSACTION_STATE_TOPIC = "__transaction_state"
_LEAST = -(2**31)


def coordinator_partition(name: str, partitions: int) -> int:
    """The partition of the group or transactional id `name`, in a topic with so many partitions."""
    value = java_hash(name)
    return 0 if value == _LEAST else abs(value) % partitions


def java_hash(text: str) -> int:
    """The result of Java's String.hashCode, by which Kafka assigns coordinators."""
    value = 0
    for unit in memoryview(text.encode("utf-16-le")).cast("H"):
        value = (value * 31 + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
