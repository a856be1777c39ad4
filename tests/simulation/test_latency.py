"""How long a row waits, in virtual time: while all is well, and when its leader goes."""

from __future__ import annotations

import random

import pytest

from outbox_plugin.core.delivery_options import Delivery
from tests.simulation.plan import KILL, STOP, Fault, Plan
from tests.simulation.schedule import run

SEEDS = range(60)


@pytest.mark.parametrize("wakes", [True, False])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_row_leaves_with_the_next_look(delivery: Delivery, wakes: bool) -> None:
    plan = Plan(delivery=delivery, harvesters=2, transactions=5, writing=8.0, wakes=wakes)
    outcomes = [run(seed, plan=plan) for seed in SEEDS]
    assert not [outcome for outcome in outcomes if outcome.broken or outcome.slowest > 0.5]


@pytest.mark.parametrize(
    ("delivery", "befalls", "seconds"),
    [
        ("exactly-once", KILL, 2.5),
        ("exactly-once", STOP, 2.0),
        ("at-least-once", KILL, 10.0),  # Nobody may lead before the group has taken the dead one for dead.
        ("at-least-once", STOP, 4.0),
    ],
)
def test_a_standby_takes_over(delivery: Delivery, befalls: str, seconds: float) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        fault = Fault(befalls, rng.uniform(3.0, 6.0), 10.0, rng.randrange(3))
        plan = Plan(
            delivery=delivery, harvesters=3, writers=4, transactions=8, writing=8.0, wakes=True, faults=(fault,)
        )
        outcome = run(seed, plan=plan)
        assert not outcome.broken, outcome
        assert outcome.slowest < seconds, outcome
