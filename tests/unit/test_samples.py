"""What a long run samples of harvesters that come and go."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from outbox_plugin import Settings
from outbox_plugin.bench.samples import Sampler


class Process:
    """A harvester's process; all have the same id, one after the other."""

    pid = 17

    def __init__(self, started_at: float, threads: int) -> None:
        self._started_at = started_at
        self._threads = threads

    def oneshot(self) -> Any:
        return nullcontext()

    def create_time(self) -> float:
        return self._started_at

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=100_000_000)

    def num_threads(self) -> int:
        return self._threads

    def num_fds(self) -> int:
        return 60


def threads_judged(*spans: tuple[float, float, int, bool]) -> tuple[float, str]:
    """For how long the judged span lasted, and how its threads are judged.

    Args:
        spans: of each, when it begins and ends, how many threads the process has, and whether it leads. A process
            starts with each span but one that leads.
    """
    sampler = Sampler(Settings(dsn="postgresql://nowhere/db", bootstrap_servers="nowhere:1"), dict, 7_200.0)
    started_at = 0.0
    for begin, end, threads, leads in spans:
        started_at = started_at if leads else begin
        for now in range(int(begin), int(end), 10):
            sampler.sample_process(now, Process(started_at, threads), leads=leads)  # type: ignore[arg-type]
    [found] = [each for each in sampler.results() if each.name.startswith("threads")]
    return found.seconds, found.trend.judgement


def test_a_process_whose_id_is_given_again_is_another_one() -> None:
    assert threads_judged((0, 600, 31, False), (6_000, 7_200, 63, False)) == (1_190, "flat")


def test_a_standby_that_begins_to_lead_does_not_grow() -> None:
    assert threads_judged((0, 600, 31, False), (600, 2_000, 63, True)) == (1_390, "flat")
