"""Takeover: how long no records flow after the leader was killed, and after it was told to stop."""

from __future__ import annotations

import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from outbox_plugin.adapters.kafka import Names, client_config
from outbox_plugin.bench.fleet import Fleet
from outbox_plugin.bench.reader import Arrival, LiveReader
from outbox_plugin.bench.scratch import Tell, create_topic, scratch_outbox
from outbox_plugin.bench.writer import Mix, Writer
from outbox_plugin.errors import OutboxError
from outbox_plugin.settings import Settings

TARGET_KILL_MEDIAN, TARGET_KILL_WORST, TARGET_HAND_OVER_MEDIAN = 1.5, 3.0, 0.3
STEADY = Mix(rows_per_second=200, connections=2, most_rows=1, rolled_back=0.0, held=0.0)
STEADY_SECONDS, PATIENCE_SECONDS = 2.0, 60.0
_PAUSE_SECONDS = 0.25  # Longer than any while nothing is disturbed.


class NotRelayed(OutboxError):
    """No harvester took over."""


@dataclass(frozen=True)
class TakeoverReport:
    """Silences in seconds, as a `read_committed` consumer saw them: after each kill -9 of the leader, each SIGTERM."""

    kills: list[float]
    hand_overs: list[float]
    target_kill_median: float = TARGET_KILL_MEDIAN
    target_kill_worst: float = TARGET_KILL_WORST
    target_hand_over_median: float = TARGET_HAND_OVER_MEDIAN

    @property
    def met(self) -> bool:
        """Whether the targets are."""
        return (
            median(self.kills) <= self.target_kill_median
            and max(self.kills) <= self.target_kill_worst
            and median(self.hand_overs) <= self.target_hand_over_median
        )

    def lines(self) -> list[str]:
        """The report for people."""
        killed, told = self.kills, self.hand_overs
        return [
            f"kill -9: median {median(killed):.2f} s, worst {max(killed):.2f} s "
            f"(at most: {self.target_kill_median} s, {self.target_kill_worst} s)",
            f"SIGTERM: median {median(told):.2f} s, worst {max(told):.2f} s (median at most: "
            f"{self.target_hand_over_median} s)",
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "met": self.met}


def takeover(settings: Settings, times: int, tell: Tell) -> TakeoverReport:
    """Kill the leader `times` times and terminate it as often, with one standby, under a writer of 200 rows a second.

    Raises:
        NotRelayed: no record came within a minute, although a harvester was standing by.
    """
    report = TakeoverReport([], [])
    with scratch_outbox(settings) as own, tempfile.TemporaryDirectory(prefix="outbox-takeover-") as folder:
        topic = f"{own.group}-events"
        create_topic(own, topic, 3)
        bench = _Bench(own, topic, Path(folder))
        with bench.reader.reading(), bench.fleet.running(), bench.writer.writing():
            for number in range(times):
                for name, silences, disturb in (
                    ("kill -9", report.kills, bench.fleet.kill),
                    ("SIGTERM", report.hand_overs, bench.fleet.terminate),
                ):
                    silences.append(bench.silence_after(disturb))
                    tell(f"{number + 1} of {times}: no records for {silences[-1]:.3f} s after {name}")
    return report


class _Bench:
    def __init__(self, settings: Settings, topic: str, folder: Path) -> None:
        self.fleet = Fleet(settings, 2, folder)
        self.writer = Writer(settings, topic, STEADY, seed=1)
        self.reader = LiveReader(settings, topic)
        self._admin = AdminClient(client_config(settings))
        self._group = Names.of(settings).leader_group
        self._members: frozenset[str] = frozenset()

    def silence_after(self, disturb: Callable[[int], None]) -> float:
        """Do it to the leader while all is calm; the longest silence from then on until all is calm again."""
        leader = self._calm_leader()
        at, ended = time.monotonic(), self.fleet.ended.total()
        disturb(leader)
        self._await(lambda: self.fleet.ended.total() > ended, "the leader has not ended")
        self._await_calm()
        return longest_gap(self.reader.arrivals, at)

    def _calm_leader(self) -> int:
        """Wait until one leads, another one has joined since the last time, and records flow steadily; who leads?"""
        self._await(self._another_has_joined, "no two harvesters have joined the leader group")
        self._await(lambda: self.fleet.leader() is not None, "no harvester leads")
        self._await_calm()
        leader = self.fleet.leader()
        if leader is None:
            raise NotRelayed("the leader has gone by itself")
        return leader

    def _another_has_joined(self) -> bool:
        """Whether there are two members again, after those who had ended have been forgotten."""
        [future] = self._admin.describe_consumer_groups([self._group]).values()
        try:
            members = frozenset(each.member_id for each in future.result(PATIENCE_SECONDS).members)
        except KafkaException:  # Its coordinator is still being found.
            return False
        if len(members) != 2 or members == self._members:
            return False
        self._members = members
        return True

    def _await_calm(self) -> None:
        since = time.monotonic()
        self._await(lambda: calm_seconds(self.reader.arrivals, since) > STEADY_SECONDS, "records do not flow steadily")

    @staticmethod
    def _await(condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise NotRelayed(f"{problem} after {PATIENCE_SECONDS:.0f} s")
            time.sleep(0.05)


def longest_gap(arrivals: Sequence[Arrival], since: float) -> float:
    """The longest time, in seconds, from one arrival to a next one that came after `since`."""
    first = bisect_right(arrivals, since, key=lambda each: each.at)
    return max((later.at - earlier.at for earlier, later in pairwise(arrivals[max(0, first - 1) :])), default=0.0)


def calm_seconds(arrivals: Sequence[Arrival], since: float) -> float:
    """For how long, up to the last arrival, records have come without a pause, after `since`."""
    calm = 0.0
    for earlier, later in pairwise(arrivals[bisect_right(arrivals, since, key=lambda each: each.at) :]):
        gap = later.at - earlier.at
        calm = calm + gap if gap < _PAUSE_SECONDS else 0.0
    return calm
