"""Flat or growing: what the judgement sees in samples."""

from __future__ import annotations

import random

import pytest

from outbox_plugin.bench.trend import Sample, trend_of


def samples(values: list[float], every: float = 12.0) -> list[Sample]:
    return [(number * every, value) for number, value in enumerate(values)]


def noisy(rise: float, count: int = 600, noise: float = 3.0) -> list[Sample]:
    chance = random.Random(1)
    return samples([70 + rise * number / count + chance.gauss(0, noise) for number in range(count)])


def test_noise_is_flat() -> None:
    trend = trend_of(noisy(0.0), 20.0)
    assert trend.judgement == "flat"
    assert abs(trend.per_hour) < 2


def test_a_slow_rise_is_growing() -> None:
    trend = trend_of(noisy(40.0), 20.0)
    assert trend.judgement == "growing"
    assert trend.per_hour == pytest.approx(20.0, abs=2)  # 40 in two hours.
    assert trend.last - trend.first == pytest.approx(32 * 0.9, abs=4)


def test_a_warm_up_is_no_growth() -> None:
    assert trend_of(samples([20.0] * 100 + [80.0] * 500), 20.0).judgement == "flat"


def test_spikes_are_no_growth() -> None:
    chance = random.Random(2)
    values = [70.0 + (400.0 if number > 300 and chance.random() < 0.3 else 0.0) for number in range(600)]
    assert trend_of(samples(values), 20.0).judgement == "flat"


def test_what_shrinks_is_flat() -> None:
    assert trend_of(noisy(-60.0), 20.0).judgement == "flat"


def test_a_fifth_of_a_large_value_is_allowed() -> None:
    assert trend_of(samples([1000 + number * 0.2 for number in range(600)]), 20.0).judgement == "flat"


def test_a_short_time_tells_nothing() -> None:
    assert trend_of(samples([1.0, 100.0, 1000.0], every=10.0), 1.0).judgement == "too short to tell"
    assert trend_of([(0.0, 5.0)], 1.0).judgement == "too short to tell"
