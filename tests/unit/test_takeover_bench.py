"""How the takeover benchmark tells silence from calm."""

from __future__ import annotations

import pytest

from outbox_plugin.bench.judge import ReadRecord
from outbox_plugin.bench.reader import Arrival
from outbox_plugin.bench.takeover import TakeoverReport, calm_seconds, longest_gap


def arrivals(*times: float) -> list[Arrival]:
    return [Arrival(at, ReadRecord(0, number, "key", "value")) for number, at in enumerate(times)]


def test_the_gap_in_which_the_leader_was_killed_counts_from_the_record_before() -> None:
    assert longest_gap(arrivals(1.0, 3.0, 3.1, 4.5, 4.6), since=3.2) == pytest.approx(1.4)


def test_a_gap_that_ended_before_does_not_count() -> None:
    assert longest_gap(arrivals(1.0, 3.0, 3.1, 3.2), since=3.05) == pytest.approx(0.1)


def test_nothing_has_come_yet() -> None:
    assert longest_gap(arrivals(1.0), since=2.0) == 0.0
    assert longest_gap([], since=2.0) == 0.0


def test_calm_is_what_came_without_a_pause_up_to_now() -> None:
    assert calm_seconds(arrivals(1.0, 1.2, 2.0, 2.2, 2.4), since=0.0) == pytest.approx(0.4)
    assert calm_seconds(arrivals(1.0, 1.2, 1.4), since=1.1) == pytest.approx(0.2)
    assert calm_seconds(arrivals(1.0), since=0.0) == 0.0


def test_targets_are_met_or_not() -> None:
    assert TakeoverReport({"kill -9": [1.0, 1.2, 2.9], "SIGTERM": [0.1, 0.3, 0.9]}).met
    assert not TakeoverReport({"kill -9": [1.0, 1.2, 3.1], "SIGTERM": [0.1]}).met
    assert not TakeoverReport({"kill -9": [1.6], "SIGTERM": [0.1]}).met
    assert not TakeoverReport({"kill -9": [1.0], "SIGTERM": [0.4]}).met
    assert not TakeoverReport({"path to Postgres stuck": [3.6]}).met


def test_what_was_not_measured_is_said() -> None:
    report = TakeoverReport({"kill -9": [1.0]}, {"packets to Kafka gone": "needs root"})
    assert report.lines()[0] == "packets to Kafka gone: not measured, needs root"
