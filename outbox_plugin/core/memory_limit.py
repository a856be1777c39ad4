"""Decides which partitions are not fetched, so that one that is handled slowly leaves room in memory for the others.

A partition may hold as much as is free. The source of this rule is Choudhury and Hahne, "Dynamic Queue Length
Thresholds for Shared-Memory Packet Switches" (1998). If n partitions are slow, each holds 1/(n+1) of the room, and as
much stays free for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from outbox_plugin.core.topic_partition import TopicPartition

RECORD_BYTES = 500  # What the objects of a record take in memory, beside its bytes.
HEADER_BYTES = 150  # The same of a header: a tuple, a string and a bytes object.


def record_size(key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]) -> int:
    """Return about how many bytes of memory a record takes, with the objects that hold it.

    Args:
        key: its key.
        value: its value.
        headers: names and values of its headers.
    """
    size = RECORD_BYTES + len(key or b"") + len(value or b"")
    for name, content in headers:
        size += HEADER_BYTES + len(name) + len(content or b"")
    return size


class Load(NamedTuple):
    """What is held in memory.

    Attributes:
        records: the number of records that wait or are being handled.
        size: about how many bytes of memory they take.
    """

    records: int
    size: int


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What may be held in memory.

    Attributes:
        records: the highest number of records.
        size: how many bytes of memory they may take.
    """

    records: int
    size: int

    def free(self, held: Load) -> Load:
        """Return what is free; it is negative if more is held than may be."""
        return Load(self.records - held.records, self.size - held.size)

    def is_half_free(self, held: Load) -> bool:
        """Return whether no partition can hold as much as is free, so that `to_pause` returns none."""
        return 2 * held.records < self.records and 2 * held.size < self.size

    def to_pause(self, held: Load, loads: Mapping[TopicPartition, Load]) -> set[TopicPartition]:
        """Return the partitions that hold at least as much as is free.

        Args:
            held: what all partitions hold, those included that are given up while records are still being handled.
            loads: what each partition holds.
        """
        free = self.free(held)
        return {tp for tp, load in loads.items() if load.records >= free.records or load.size >= free.size}

    def to_resume(self, held: Load, loads: Mapping[TopicPartition, Load]) -> set[TopicPartition]:
        """Return the partitions that hold less than half of what is free. `to_pause` describes the arguments."""
        free = self.free(held)
        return {tp for tp, load in loads.items() if 2 * load.records < free.records and 2 * load.size < free.size}

    def records_to_poll(self, held: Load, limit: int) -> int:
        """Return how many records to poll, at most. They leave half of what is free to other partitions.

        Args:
            held: what all partitions hold. The next records are assumed to have the average size of these.
            limit: the highest number to return.
        """
        free = self.free(held)
        by_size = free.size * held.records // max(1, held.size)
        return max(0, min(limit, free.records // 2, by_size // 2))
