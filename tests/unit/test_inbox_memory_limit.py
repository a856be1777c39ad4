"""Memory is shared so that partitions that are handled slowly leave room for the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.memory_limit import Load, MemoryLimit
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import poll_loop

MEMORY_LIMIT = MemoryLimit(1_000, 100_000)
SLOW, OTHER = TopicPartition("t", 0), TopicPartition("t", 1)


def load_of(loads: dict[TopicPartition, Load]) -> Load:
    return Load(sum(each.records for each in loads.values()), sum(each.size for each in loads.values()))


@pytest.mark.parametrize("slow", [Load(500, 0), Load(0, 50_000)], ids=["records", "bytes"])
def test_a_partition_is_paused_at_what_is_free_and_resumed_at_half(slow: Load) -> None:
    loads = {SLOW: slow, OTHER: Load(10, 1_000)}
    assert MEMORY_LIMIT.to_pause(load_of(loads), loads) == {SLOW}
    loads[SLOW] = Load(slow.records * 4 // 5, slow.size * 4 // 5)
    assert MEMORY_LIMIT.to_pause(load_of(loads), loads) == set()
    assert MEMORY_LIMIT.to_resume(load_of(loads), loads) == {OTHER}
    loads[SLOW] = Load(slow.records // 2, slow.size // 2)
    assert MEMORY_LIMIT.to_resume(load_of(loads), loads) == {SLOW, OTHER}


def test_one_partition_alone_has_room_for_four_large_batches_and_what_comes_after_them() -> None:
    held = Load(9_999, 10_000_000)
    assert poll_loop.MEMORY_LIMIT.to_pause(held, {SLOW: held}) == set()


def test_all_are_paused_where_nothing_is_free() -> None:
    assert MEMORY_LIMIT.to_pause(Load(1_000, 0), {OTHER: Load(0, 0)}) == {OTHER}


@given(st.lists(st.integers(0, 4), min_size=50, max_size=200))
def test_however_many_partitions_are_slow_another_finds_room(arrivals: list[int]) -> None:
    """Nothing is handled. Each poll returns records of one partition."""
    loads = {TopicPartition("t", number): Load(0, 0) for number in range(6)}
    for number in arrivals:
        tp = TopicPartition("t", number)
        held = load_of(loads)
        assert not (MEMORY_LIMIT.is_half_free(held) and MEMORY_LIMIT.to_pause(held, loads))
        if tp not in MEMORY_LIMIT.to_pause(held, loads):
            records = 1 + MEMORY_LIMIT.records_to_poll(held, 1_000)
            loads[tp] = Load(loads[tp].records + records, loads[tp].size + 100 * records)
    held = load_of(loads)
    assert held.records < MEMORY_LIMIT.records
    assert TopicPartition("t", 5) not in MEMORY_LIMIT.to_pause(held, loads)


def test_no_more_is_polled_than_half_of_what_is_free() -> None:
    assert MEMORY_LIMIT.records_to_poll(Load(1, 100), 1_000) == 499
    assert MEMORY_LIMIT.records_to_poll(Load(10, 80_000), 1_000) == 1
    assert MEMORY_LIMIT.records_to_poll(Load(1, 10), 7) == 7
    assert MEMORY_LIMIT.records_to_poll(Load(2_000, 1), 7) == 0
