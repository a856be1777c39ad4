"""The longest time without records of a consumer, and the faults that were active in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

AFTERMATH_SECONDS = 5.0


class Injected(NamedTuple):
    """A fault that was injected; times in seconds since the run began."""

    kind: str
    description: str
    began: float
    ended: float


class Gap(NamedTuple):
    """From one arrival to the next, in seconds since the run began; `faults` were active, or had just ended."""

    began: float
    seconds: float
    faults: tuple[Injected, ...]

    def __str__(self) -> str:
        faults = "; ".join(f"{each.description} ({each.began:.1f} to {each.ended:.1f} s)" for each in self.faults)
        return (
            f"longest time without records {self.seconds:.2f} s, from {self.began:.1f} s on; "
            f"faults then: {faults or 'none'}"
        )


def explain_longest_gap(arrivals: Sequence[float], injected: Sequence[Injected]) -> Gap:
    """The longest time between two arrivals, and each fault that lasted into it or ended shortly before it."""
    began, ended = max(pairwise(arrivals), key=lambda pair: pair[1] - pair[0], default=(0.0, 0.0))
    faults = [each for each in injected if each.began < ended and each.ended > began - AFTERMATH_SECONDS]
    return Gap(began, ended - began, tuple(sorted(faults, key=lambda each: each.began)))
