"""Options: how many schedules to run, and which one to replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.simulation.schedule import in_miniature
from tests.slow_test_share import SHARES, present_share

SCHEDULES = 4_000

Seeds = Callable[[int], range]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--schedules", type=int, default=None, help="how many schedules each test simulates")
    group.addoption("--first-seed", type=int, default=0, help="the seed of the first one")
    group.addoption("--seed", type=int, default=None, help="replay the schedule of this seed, and print its trace")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Seeds:
    """Returns the seeds that a test of so many schedules runs. `make test` runs the commit's share of them.

    In a run of the whole suite there are no options: pytest reads this file too late for them.
    """
    option = request.config.getoption

    def seeds_of(schedules: int) -> range:
        if (seed := option("--seed", None)) is not None:
            return range(seed, seed + 1)
        first: int = option("--first-seed", 0)
        seeds = range(first, first + (option("--schedules", None) or schedules))
        return seeds[present_share(request.config.rootpath) :: SHARES] if option("--share") else seeds

    return seeds_of


@pytest.fixture
def tells(request: pytest.FixtureRequest) -> bool:
    """Whether to record a readable trace."""
    return request.config.getoption("--seed", None) is not None


@pytest.fixture(autouse=True)
def _in_miniature() -> Iterator[None]:
    with in_miniature():
        yield
