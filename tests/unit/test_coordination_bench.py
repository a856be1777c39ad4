"""The world of many partitions is soon computed, and does not grow with its log."""

from __future__ import annotations

from outbox_plugin.bench.coordination import coordination


def test_memory_does_not_grow_with_the_log() -> None:
    report = coordination(partitions=300, instances=20)
    first, second, third = report.lengths
    assert third == 3 * first
    assert max(report.megabytes) < 1.05 * min(report.megabytes), report
    assert second == 2 * first


def test_a_big_world_is_computed_in_time() -> None:
    """A tenth of 10,000 partitions and 500 instances, in less than a tenth of five seconds."""
    report = coordination(partitions=1_000, instances=50)
    assert report.messages == 30_000
    assert report.cpu_seconds < 0.5
