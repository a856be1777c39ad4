"""What a tick of a topic's sensor decides."""

from __future__ import annotations

from outbox_plugin.core.topic_ranges import Planned, Position, TopicRange
from outbox_plugin.dagster.range_decisions import Bounds, Memory, RangeDecision, decide

BOUNDS = Bounds(max_records=100, max_wait_seconds=60.0)


def planned(lag: int, begin: int = 0) -> Planned:
    if not lag:
        return Planned(None, 0)
    taken = min(lag, BOUNDS.max_records)
    return Planned(TopicRange("totals", "orders", "id", {0: begin}, {0: begin + taken}), lag)


def at(offset: int) -> Position:
    return Position("id", {0: offset})


def ticked(memory: Memory, lag: int, now: float, unfinished: str | None = None, begin: int = 0) -> RangeDecision:
    return decide(memory, at(begin), planned(lag, begin), unfinished, BOUNDS, now)


def test_a_full_range_is_requested_at_once_and_a_small_one_when_it_has_waited() -> None:
    assert ticked(Memory(), 100, 1000.0).range
    waits = ticked(Memory(), 99, 1000.0)
    assert waits.range is None
    assert "wait for up to 60 s more" in waits.why
    still = ticked(waits.memory, 99, 1059.0)
    assert (still.range, still.waited_seconds) == (None, 59.0)
    assert ticked(still.memory, 99, 1060.0).range


def test_the_wait_begins_when_records_are_there() -> None:
    idle = ticked(Memory(), 0, 1000.0)
    assert idle.range is None
    assert ticked(idle.memory, 5, 5000.0).waited_seconds == 0.0


def test_one_range_is_in_flight() -> None:
    assert ticked(Memory(), 500, 1000.0, "the run 5 is queued").range is None


def test_a_range_that_failed_is_requested_again_more_and_more_slowly() -> None:
    decision, now, pauses = ticked(Memory(), 500, 1000.0), 1000.0, []
    for _ in range(9):
        busy = ticked(decision.memory, 500, now + 10, "the run 5 is started")
        asked = now = now + 10
        decision = busy
        while not decision.range:
            now += 1
            decision = ticked(decision.memory, 500, now)
        pauses.append(now - asked)
    assert pauses == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_after_a_range_was_consumed_the_next_one_is_requested_at_once() -> None:
    first = ticked(Memory(), 500, 1000.0)
    assert ticked(first.memory, 400, 1001.0, begin=100).range


def test_new_partitions_do_not_begin_the_wait_anew() -> None:
    first = decide(Memory(), at(0), planned(5), None, BOUNDS, 1000.0)
    wider = Planned(TopicRange("totals", "orders", "id", {0: 0, 1: 0}, {0: 5, 1: 3}), 8)
    assert decide(first.memory, at(0), wider, None, BOUNDS, 1060.0).range


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    first = ticked(Memory(), 500, 1000.0)
    assert ticked(first.memory, 500, 900.0).range


def test_a_clock_that_was_set_back_begins_the_wait_anew() -> None:
    first = ticked(Memory(), 5, 100_000.0)
    earlier = ticked(first.memory, 5, 1_000.0)
    assert ticked(earlier.memory, 5, 1_060.0).range


def test_the_cursor_is_read_back_and_another_ones_is_ignored() -> None:
    memory = ticked(Memory(), 500, 1000.0).memory
    assert Memory.parse(memory.encode()) == memory
    for text in (None, "", "{", '{"x": 1}', '{"requests": -1}', "\ud800"):
        assert Memory.parse(text) == Memory()
