"""Lanes that are held back, and when they go on."""

from __future__ import annotations

from outbox_plugin.core.held import HeldLanes
from outbox_plugin.core.lanes import Lane


def walks(held: HeldLanes, *, seconds: float, reads: int = 1_000) -> int:
    """How often the table is walked from its beginning while it is read so often, evenly, in ten seconds.

    Each read takes no time, unless it is such a walk: then it takes `seconds`.
    """
    now, found = 0.0, 0
    while now < 10.0:
        if held.release(now):
            found += 1
            now += seconds
        now += 10.0 / reads
    return found


def many() -> HeldLanes:
    held = HeldLanes()
    held.hold({Lane(f"topic-{number}", None): 0.01 * number for number in range(1_000)})
    return held


def test_a_lane_goes_on_when_its_time_is_over() -> None:
    held = HeldLanes()
    held.hold({Lane("t", None): 1.0})
    assert not held.release(0.9)
    assert held.release(1.0)
    assert not held.lanes


def test_lanes_whose_times_are_over_one_after_another_go_on_together() -> None:
    """Each time, the table is walked from its beginning: a thousand of them would be a storm."""
    held = many()
    assert walks(held, seconds=0.0) <= 41
    assert len(held.lanes) < 30


def test_where_the_walk_takes_long_it_is_made_less_often() -> None:
    assert walks(many(), seconds=0.1) <= 11
