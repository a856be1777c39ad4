"""OrderingKeys that are held back, and when they go on."""

from __future__ import annotations

from outbox_plugin.core.held_keys import HeldKeys
from outbox_plugin.core.ordering_key import OrderingKey


def test_a_lane_goes_on_when_its_time_is_over() -> None:
    held = HeldKeys()
    held.hold({OrderingKey("t", None): 1.0})
    assert not held.release(0.9)
    assert held.release(1.0)
    assert not held.keys


def test_lanes_whose_times_are_over_one_after_another_go_on_together() -> None:
    """Each time, the table is walked from its beginning: a thousand of them would be a storm."""
    held = HeldKeys()
    held.hold({OrderingKey(f"topic-{number}", None): 0.01 * number for number in range(1_000)})
    assert sum(held.release(0.01 * turn) for turn in range(1_000)) <= 41
    assert len(held.keys) < 30
