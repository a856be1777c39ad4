"""Options: how many schedules to run, and which one to replay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.schedule import in_miniature

SCHEDULES = 4_000


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption(
        "--schedules", type=int, default=SCHEDULES, help="how many schedules to simulate (default: %(default)s)"
    )
    group.addoption("--first-seed", type=int, default=0, help="the seed of the first one")
    group.addoption("--seed", type=int, default=None, help="replay the schedule of this seed, and print its trace")


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    """The seeds to run. In a run of the whole suite there are no options: pytest reads this file too late for them."""
    if (seed := request.config.getoption("--seed", None)) is not None:
        return range(seed, seed + 1)
    first: int = request.config.getoption("--first-seed", 0)
    return range(first, first + request.config.getoption("--schedules", SCHEDULES))


@pytest.fixture
def tells(request: pytest.FixtureRequest) -> bool:
    """Whether to record a readable trace."""
    return request.config.getoption("--seed", None) is not None


@pytest.fixture(autouse=True)
def _in_miniature() -> Iterator[None]:
    with in_miniature():
        yield
