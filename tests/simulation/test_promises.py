"""Thousands of schedules, each judged by the promises."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.relay.leader_term import Ending
from tests.simulation.conftest import SCHEDULES, Seeds
from tests.simulation.kafka import SimulatedMembership
from tests.simulation.plan import EMPTIED, HELD, KILL, NO_POSTGRES, POSTGRES_DOWN, RESHARD, STOP, Fault, Plan
from tests.simulation.schedule import Outcome, run

RESTART = (Fault(STOP, 6.0, 0.0, 0),)
SPREADS = 8  # Schedules of each kind in which shards are spread.
# So many shards, and so slow a way to the servers, that leaders which recover the same slices would do so for long.
MANY_SHARDS = Plan(shards=16, harvesters=2, writers=4, keys=8, latency=0.05, faults=(Fault(RESHARD, 3.0, 0.0, 32),))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_promises_hold_in_every_schedule(seeds: Seeds, tells: bool) -> None:
    for seed in seeds(SCHEDULES):
        outcome = run(seed, tell=tells)
        if tells:
            print(outcome.plan, *outcome.trace, sep="\n")
        assert not outcome.broken, (
            f"seed {seed}: {'; '.join(outcome.broken)}\n{outcome.plan}\n"
            f"replay it: pytest tests/simulation/test_promises.py -s --seed {seed}"
        )


def with_held_ways(seed: int) -> Plan:
    """The plan of a seed, and besides its faults one to four ways to a broker that are held for a while."""
    plan, rng = Plan.draw(seed), random.Random(seed)
    held = tuple(
        Fault(HELD, rng.uniform(0.2, plan.writing), rng.uniform(0.5, 15.0), rng.randrange(plan.harvesters))
        for _ in range(rng.randint(1, 4))
    )
    return replace(plan, faults=tuple(sorted(plan.faults + held, key=lambda fault: fault.at)))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_promises_hold_while_a_broker_does_not_answer_some_harvesters(seeds: Seeds) -> None:
    for seed in seeds(300):
        outcome = run(seed, plan=with_held_ways(seed))
        assert not outcome.broken, outcome


def with_starts(seed: int) -> Plan:
    """The plan of a seed with one shard, whose harvesters end and start all the time, some killed while they hand over.

    Somebody deletes the leader topic's records now and then, so that those who start find no leader there.
    """
    plan, rng = Plan.draw(seed), random.Random(seed)
    harvesters = max(plan.harvesters, rng.choice((2, 3, 5, 10)))
    starts = [Fault(EMPTIED, rng.uniform(0.1, plan.writing), 0.0, 0) for _ in range(rng.randint(0, 4))]
    for _ in range(rng.randint(3, 12)):
        kind, at, target = rng.choice((STOP, STOP, KILL)), rng.uniform(0.1, plan.writing), rng.randrange(harvesters)
        starts.append(Fault(kind, at, 0.0, target))
        if kind == STOP and rng.random() < 0.4:
            starts.append(Fault(KILL, at + rng.uniform(0.0, 0.5), 0.0, target))
    faults = sorted((*plan.faults, *starts), key=lambda fault: fault.at)
    return replace(plan, shards=1, harvesters=harvesters, faults=tuple(faults))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("believes", [False, True], ids=["as the leader topic says", "whatever it says"])
def test_the_promises_hold_while_harvesters_start_where_nobody_seems_to_lead(
    seeds: Seeds, monkeypatch: pytest.MonkeyPatch, *, believes: bool
) -> None:
    """Whether somebody leads decides only how soon another takes over. That nobody loses by it is the fence's work."""
    if believes:
        monkeypatch.setattr(SimulatedMembership, "_is_vacant", lambda *_: True)
    for seed in seeds(100):
        outcome = run(seed, plan=with_starts(seed))
        assert not outcome.broken, outcome


def test_a_seed_is_a_schedule() -> None:
    traces = [run(seed, tell=True).trace for seed in (5, 5, 6)]
    assert traces[0] == traces[1] != traces[2]


def with_ends(seed: int, harvesters: int, shards: int) -> Plan:
    """A plan in which harvesters are killed or stopped, and started again, and nothing else happens."""
    rng = random.Random(seed)
    ends = [
        Fault(rng.choice((KILL, STOP)), rng.uniform(4.0, 9.0), 0.0, rng.randrange(harvesters))
        for _ in range(rng.choice((1, 2)))
    ]
    return Plan(
        delivery=rng.choice(("exactly-once", "at-least-once")),
        harvesters=harvesters,
        shards=shards,
        writing=30.0,
        faults=tuple(sorted(ends, key=lambda fault: fault.at)),
    )


def led_at_last(outcome: Outcome) -> list[int]:
    """How many shards each harvester leads when the writing ends, in ascending order."""
    leaders: dict[str, str] = {}
    for line in outcome.trace:
        step = re.match(r" *([\d.]+) (\w+)\.\S+ +ShardStepped\(shard=(\d+), phase='leader'", line)
        if step is not None and float(step[1]) < outcome.plan.writing:
            leaders[step[3]] = step[2]
    led = Counter({f"h{number}": 0 for number in range(outcome.plan.harvesters)})
    led.update(leaders.values())
    return sorted(led.values())


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("seed", range(8))
def test_shards_are_spread_evenly_again_after_a_crash(seed: int, delivery: Delivery) -> None:
    """Others lead the shards of the one that died, until it is back."""
    crash = Fault(KILL, random.Random(seed).uniform(4.0, 8.0), 0.0, seed % 3)
    plan = Plan(delivery=delivery, shards=6, harvesters=3, writers=2, transactions=8, writing=40.0, faults=(crash,))
    outcome = run(seed, plan=plan, tell=True)
    assert not outcome.broken
    assert led_at_last(outcome) == [2, 2, 2]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("harvesters", "shards"), [(3, 6), (3, 7), (4, 8), (5, 9), (4, 3)])
def test_shards_are_spread_evenly_again_where_harvesters_come_and_go(harvesters: int, shards: int) -> None:
    for seed in range(SPREADS):
        outcome = run(seed, plan=with_ends(seed, harvesters, shards), tell=True)
        assert not outcome.broken
        led = led_at_last(outcome)
        assert led[-1] - led[0] <= 1, f"seed {seed}: {led}"
        assert sum(led) == shards


@pytest.mark.parametrize("seed", range(4))
def test_a_harvester_that_is_restarted_twice_gets_its_share_both_times(seed: int) -> None:
    faults = (Fault(STOP, 5.0, 0.0, 0), Fault(STOP, 14.0, 0.0, 0))
    outcome = run(seed, plan=Plan(shards=6, harvesters=2, writing=34.0, faults=faults), tell=True)
    assert not outcome.broken
    assert led_at_last(outcome) == [3, 3]


def test_a_leader_that_gives_its_shard_to_the_owner_finishes_its_transaction_however_slow_kafka_is() -> None:
    plan = Plan(
        shards=6, harvesters=3, writers=3, transactions=14, writing=20.0, keys=12, kafka_latency=0.6, faults=RESTART
    )
    outcomes = [run(seed, plan=plan, tell=True) for seed in range(8)]
    assert not [outcome.broken for outcome in outcomes if outcome.broken]
    ends = [line for outcome in outcomes for line in outcome.trace if Ending.GAVE_TO_OWNER.value in line]
    assert ends
    assert not [line for line in ends if "error_type=None" not in line]


@pytest.mark.parametrize("seed", range(4))
def test_shards_are_spread_evenly_again_when_postgres_is_back(seed: int) -> None:
    """All leaders have failed by then, some of them again and again."""
    down = Fault(POSTGRES_DOWN, 16.0, 8.0, 0)
    outcome = run(seed, plan=Plan(shards=7, harvesters=4, writing=52.0, faults=(down,)), tell=True)
    assert not outcome.broken
    assert led_at_last(outcome) == [1, 2, 2, 2]


@pytest.mark.parametrize("seed", range(4))
def test_a_harvester_without_a_way_to_postgres_asks_for_no_shard(seed: int) -> None:
    """Each one that it got would stand still until somebody else takes it over."""
    cut_off = Fault(NO_POSTGRES, 20.0, 100.0, 0)
    outcome = run(seed, plan=Plan(shards=6, harvesters=3, writing=60.0, faults=(cut_off,)), tell=True)
    assert not outcome.broken
    given = [float(line.split()[0]) for line in outcome.trace if Ending.GAVE_TO_OWNER.value in line]
    assert not [at for at in given if 20.0 < at < 120.0]


@pytest.mark.parametrize("seed", range(4))
def test_from_sixteen_shards_to_thirty_two_takes_seconds(seed: int) -> None:
    outcome = run(seed, plan=MANY_SHARDS)
    assert not outcome.broken
    assert outcome.slowest < 15.0
