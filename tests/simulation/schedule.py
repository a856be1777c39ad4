"""Makes one schedule from a seed, runs it, and judges it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from outbox_plugin.core import (
    adaptive_read_limit,
    backlog,
    id_watermark,
    poll_schedule,
    progress,
    rows_beside_live,
    window,
)
from outbox_plugin.relay import at_least_once, exactly_once, supervisor
from tests.simulation.harvesters import Simulation
from tests.simulation.plan import Plan
from tests.simulation.promises import broken, slowest
from tests.simulation.scheduler import Stuck


@dataclass(frozen=True)
class Outcome:
    """The result of a schedule; `trace` is empty unless it was requested."""

    seed: int
    plan: Plan
    broken: list[str]
    trace: list[str]
    events: int
    seconds: float
    slowest: float  # Seconds from a commit until a consumer could see it.


@contextmanager
def in_miniature() -> Iterator[None]:
    """Small windows, so that few rows make many windows; and few idle polls, which prove nothing."""
    with (
        mock.patch.object(adaptive_read_limit, "ROWS_PER_WINDOW", 3),
        mock.patch.object(id_watermark, "SWEEP_IDS", 5),
        mock.patch.object(id_watermark, "BULK_IDS", 20),
        mock.patch.object(progress, "WIDE_GAP", 6),
        mock.patch.object(backlog, "MIN_BACKLOG_IDS", 20),
        mock.patch.object(backlog, "SEARCH_SECONDS", 0.1),
        mock.patch.object(backlog, "PAUSE_SECONDS", 0.03),
        mock.patch.object(backlog, "SUMMARY_REST", 1.0),
        mock.patch.object(backlog, "SUMMARY_REST_SECONDS", 0.2),
        mock.patch.object(rows_beside_live, "MIN_ROWS", 2),
        mock.patch.object(rows_beside_live, "MAX_ROWS", 2),
        mock.patch.object(window, "UNPURGED_WINDOWS", 4),
        mock.patch.object(exactly_once, "PURGE_ROWS", 7),
        mock.patch.object(at_least_once, "PURGE_ROWS", 5),
        mock.patch.object(poll_schedule, "IDLE_LAST", 0.4),
        mock.patch.object(at_least_once, "ROWS_PER_MARK", 4),
        mock.patch.object(at_least_once, "UNPURGED_ROWS", 8),
        mock.patch.object(supervisor, "LISTEN_SECONDS", 0.25),
        mock.patch.object(supervisor, "LISTEN_WHILE_JOINING_SECONDS", 0.1),
    ):
        yield


def run(seed: int, *, plan: Plan | None = None, tell: bool = False) -> Outcome:
    """Run the schedule of a seed, or of a plan and a seed. Call it within `in_miniature`."""
    plan = plan or Plan.draw(seed)
    simulation = Simulation(seed, plan, tell=tell)
    said: list[str] = []
    try:
        simulation.run()
    except Stuck as stuck:
        said = [f"loss: rows do not leave: {stuck}"]
    said += broken(simulation)
    events, now = len(simulation.database.events), simulation.scheduler.now
    return Outcome(seed, plan, said, simulation.trace, events, now, slowest(simulation))
