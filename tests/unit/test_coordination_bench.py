"""The world of many partitions is soon computed, and does not grow with its log."""

from __future__ import annotations

from outbox_plugin.bench.coordination import coordination


def test_memory_does_not_grow_with_the_log() -> None:
    report = coordination(partitions=300, instances=20)
    first, second, third = report.lengths
    assert third == 3 * first
    assert max(report.megabytes) < 1.05 * min(report.megabytes), report
    assert second == 2 * first


def test_a_message_costs_the_same_in_a_big_world() -> None:
    """Ten times as many partitions and instances: a message's cost must not grow with them."""
    small, big = coordination(partitions=100, instances=5), coordination(partitions=1_000, instances=50)
    assert big.messages == 10 * small.messages
    assert big.cpu_seconds / big.messages < 4 * small.cpu_seconds / small.messages
