"""How long a row waits, in virtual time: while all is well, and when its leader goes."""

from __future__ import annotations

import random

import pytest

from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.core.leadership_transfer import LeadershipTransfer
from outbox_plugin.relay.leader_term import Ending
from tests.simulation.plan import HELD, KILL, STOP, Fault, Plan
from tests.simulation.schedule import run

SEEDS = range(60)
HELD_SECONDS = 5.0  # The longest silence while a broker does not answer the leader, and all answer a standby.


def held(delivery: Delivery, seed: int, harvesters: int = 3, *, all_are_held: bool = False) -> Plan:
    """A broker stops answering one harvester, or all of them, while rows are written."""
    rng = random.Random(seed)
    at, target = rng.uniform(2.5, 5.0), rng.randrange(harvesters)
    targets = range(harvesters) if all_are_held else [target]
    return Plan(
        delivery=delivery,
        harvesters=harvesters,
        writers=4,
        transactions=12,
        writing=12.0,
        wakes=True,
        faults=tuple(Fault(HELD, at, 30.0, each) for each in targets),
    )


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


@pytest.mark.parametrize("harvesters", [2, 3])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_leader_whom_a_broker_does_not_answer_gives_way(delivery: Delivery, harvesters: int) -> None:
    for seed in SEEDS:
        outcome = run(seed, plan=held(delivery, seed, harvesters))
        assert not outcome.broken, outcome
        assert outcome.slowest < HELD_SECONDS, outcome


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_nobody_gives_way_where_a_broker_answers_nobody(delivery: Delivery) -> None:
    for seed in range(20):
        plan = held(delivery, seed, all_are_held=True)
        outcome = run(seed, plan=plan, tell=True)
        assert not outcome.broken, outcome
        answers_again_at = min(fault.at + fault.seconds for fault in plan.faults)
        gave_way = [line for line in outcome.trace if Ending.GAVE_WAY.value in line]
        assert not [line for line in gave_way if float(line.split()[0]) < answers_again_at], outcome


def test_it_is_noticed_if_a_leader_does_not_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeadershipTransfer, "successor", lambda *_: None)
    assert max(run(seed, plan=held("exactly-once", seed)).slowest for seed in range(10)) > HELD_SECONDS
