"""A short run of what `python -m tests.chaos.coordination` does at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_plugin.coordination.consumer import Guarantee
from tests.chaos.coordination import move, run
from tests.chaos.coordination_referee import Plan, broken_promises, describe

pytestmark = [pytest.mark.integration, pytest.mark.chaos]


@pytest.mark.parametrize("guarantee", ["at-least-once", "at-most-once"])
def test_promises_hold_while_instances_are_killed_and_stopped(
    bootstrap_servers: str, tmp_path: Path, guarantee: Guarantee
) -> None:
    plan = Plan(
        guarantee,
        instances=4,
        partitions=8,
        records=40_000,
        seconds=30,
        interval=4,
        silent_intervals=5.0,  # More than in the long run, as others keep the machine busy.
    )
    found = run(plan, bootstrap_servers, tmp_path)
    print(describe(found))
    assert broken_promises(plan, found) == []
    assert found.kills + found.stops + found.holds > 3


def test_a_group_in_full_flow_is_paused_moved_and_resumed(bootstrap_servers: str, tmp_path: Path) -> None:
    plan = Plan("at-least-once", instances=3, partitions=8, records=40_000, seconds=10, interval=4, added=0)
    moved = move(plan, bootstrap_servers, tmp_path)
    assert moved.stopped < moved.allowed
    assert moved.exact == plan.partitions
