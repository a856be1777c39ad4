"""What a chaos run of a given seed and length does."""

from __future__ import annotations

from itertools import pairwise

from outbox_plugin.bench.faults import plan


def test_the_full_run_does_what_it_is_to_do() -> None:
    harvesters, brokers, postgres = plan(1, 600, 3, 3)
    assert (len(harvesters), len(brokers), len(postgres)) == (100, 20, 20)
    assert {fault.kind for fault in harvesters} == {"kill", "pause", "terminate"}
    assert {fault.victim for fault in harvesters} == {fault.victim for fault in brokers} == {0, 1, 2}
    for faults in (harvesters, brokers, postgres):
        assert all(earlier.at <= later.at for earlier, later in pairwise(faults))
        assert faults[0].at >= 0
        assert faults[-1].at <= 600


def test_a_seed_repeats_itself() -> None:
    assert plan(7, 60, 3, 3) == plan(7, 60, 3, 3)
    assert plan(7, 60, 3, 3) != plan(8, 60, 3, 3)


def test_the_shortest_run_has_one_of_each() -> None:
    assert [len(faults) for faults in plan(1, 1, 3, 3)] == [1, 1, 1]
