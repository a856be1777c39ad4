"""The partition of a transactional id's coordinator, as Kafka's brokers compute it."""

from __future__ import annotations

import pytest

from outbox_plugin.core.coordinator_partition import coordinator_partition, java_hash


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0), ("abc", 96354), ("polygenelubricants", -(2**31)), ("é😀", 1_996_812)]
)
def test_strings_hash_as_in_java(text: str, expected: int) -> None:
    assert java_hash(text) == expected


@pytest.mark.parametrize(("name", "partition"), [("abc", 4), ("polygenelubricants", 0)])
def test_the_partition_of_a_coordinator(name: str, partition: int) -> None:
    """Java has no absolute value of its least number: Kafka takes 0."""
    assert coordinator_partition(name, 50) == partition
