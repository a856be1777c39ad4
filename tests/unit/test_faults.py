"""What a chaos run of a given seed and length does."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import get_args

from outbox_plugin.bench.faults import CLIENT_KINDS, NETWORK_KINDS, Kind, plan


def test_the_full_run_does_what_it_is_to_do() -> None:
    planned = plan(1, 600, 3, 3)
    assert {actor: len(faults) for actor, faults in planned.items()} == {
        "harvesters": 100,
        "brokers": 20,
        "postgres": 30,
        "network": 30,
        "clients": 60,
    }
    kinds = Counter(fault.kind for faults in planned.values() for fault in faults)
    assert set(kinds) == set(get_args(Kind))
    assert (kinds["postgres"], kinds["failover"]) == (20, 10)
    for actor in ("harvesters", "brokers", "network"):
        assert {fault.victim for fault in planned[actor]} == {0, 1, 2}
    for faults in planned.values():
        assert all(earlier.at <= later.at for earlier, later in pairwise(faults))
        assert faults[0].at >= 0
        assert faults[-1].at <= 600


def test_networks_are_disturbed_in_all_ways_for_up_to_40_seconds() -> None:
    faults = [fault for seed in range(20) for fault in plan(seed, 600, 3, 3)["network"]]
    assert {fault.target for fault in faults} == {0, 1, 2, 3, 4}
    assert {fault.directions for fault in faults} == {0, 1, 2}
    assert 30 < max(fault.seconds for fault in faults) <= 40


def test_a_seed_repeats_itself() -> None:
    assert plan(7, 60, 3, 3) == plan(7, 60, 3, 3)
    assert plan(7, 60, 3, 3) != plan(8, 60, 3, 3)


def test_the_shortest_run_has_one_of_each_kind_that_comes_in_turn() -> None:
    planned = plan(1, 1, 3, 3)
    assert (len(planned["harvesters"]), len(planned["brokers"])) == (1, 1)
    assert [fault.kind for fault in planned["postgres"]] == ["postgres", "failover"]
    assert tuple(fault.kind for fault in planned["network"]) == NETWORK_KINDS
    assert tuple(fault.kind for fault in planned["clients"]) == CLIENT_KINDS
    assert all(fault.seconds <= 0.25 for fault in planned["network"])


def test_a_soak_has_faults_now_and_then() -> None:
    assert {actor: len(faults) for actor, faults in plan(1, 7200, 3, 3).items()} == {
        "harvesters": 120,
        "brokers": 24,
        "postgres": 36,
        "network": 36,
        "clients": 72,
    }
