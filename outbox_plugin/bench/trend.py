"""Whether a quantity that was sampled over time is flat or grows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Literal, NamedTuple

WARM_UP_SHARE = 0.2  # The share of the time in which caches and pools fill.
MIN_SECONDS = 300.0
ALLOWED_SHARE = 0.2
_MAX_POINTS = 200  # 19,900 slopes.

Sample = tuple[float, float]  # Seconds, value.


class Trend(NamedTuple):
    """How a quantity developed: its value at the beginning and at the end, and its rise per hour."""

    first: float
    last: float
    per_hour: float
    judgement: Literal["flat", "growing", "too short to tell"]


def trend_of(samples: Sequence[Sample], allowed_rise: float) -> Trend:
    """Judge samples in the order of their times.

    The slope is Theil and Sen's: the median of the slopes between all pairs of samples. Up to 29 % of the samples may
    be outliers, so a spike does not look like growth. The first fifth of the time is left out.

    Args:
        samples: at least one.
        allowed_rise: what the quantity may rise over the whole time and still be flat; or a fifth of its median, where
            that is more.
    """
    began, ended = samples[0][0], samples[-1][0]
    settled = [each for each in samples if each[0] >= began + (ended - began) * WARM_UP_SHARE]
    settled = settled[:: -(-len(settled) // _MAX_POINTS)]
    slopes = [(late[1] - early[1]) / (late[0] - early[0]) for early, late in combinations(settled, 2)]
    slope = median(slopes) if slopes else 0.0
    rise, span = slope * (ended - began), settled[-1][0] - settled[0][0]
    is_growing = rise > max(allowed_rise, ALLOWED_SHARE * median(value for _, value in settled))
    judgement: Literal["flat", "growing", "too short to tell"] = "growing" if is_growing else "flat"
    if span < MIN_SECONDS:
        judgement = "too short to tell"
    tenth = -(-len(settled) // 10)
    first, last = (median(value for _, value in part) for part in (settled[:tenth], settled[-tenth:]))
    return Trend(first, last, slope * 3600, judgement)
