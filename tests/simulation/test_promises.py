"""Thousands of schedules, each judged by the promises."""

from __future__ import annotations

import pytest

from tests.simulation.schedule import run


@pytest.mark.timeout(0)
def test_the_promises_hold_in_every_schedule(seeds: range, tells: bool) -> None:
    for seed in seeds:
        outcome = run(seed, tell=tells)
        if tells:
            print(outcome.plan, *outcome.trace, sep="\n")
        assert not outcome.broken, (
            f"seed {seed}: {'; '.join(outcome.broken)}\n{outcome.plan}\n"
            f"replay it: pytest tests/simulation/test_promises.py -s --seed {seed}"
        )


def test_a_seed_is_a_schedule() -> None:
    traces = [run(seed, tell=True).trace for seed in (5, 5, 6)]
    assert traces[0] == traces[1] != traces[2]
