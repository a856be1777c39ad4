"""Which faults a chaos run injects, and when: decided by a seed before the run. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

HARVESTER_EVERY, BROKER_EVERY, POSTGRES_EVERY = 6.0, 30.0, 30.0
Kind = Literal["kill", "pause", "terminate", "broker", "postgres"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, `at` seconds after the beginning.

    `victim` numbers the harvester or broker; with `leader`, the harvester that leads is meant, if one does.
    `seconds`: how long a paused harvester, or a broker or Postgres that was stopped, stays away.
    """

    at: float
    kind: Kind
    victim: int
    leader: bool
    seconds: float


def plan(seed: int, seconds: float, harvesters: int, brokers: int) -> list[list[Fault]]:
    """The faults of a run of `seconds`: those of harvesters, of brokers, and of Postgres, each in their order.

    Each kind comes once in every span of its length, at any time in it; the kinds know nothing of each other, so that
    they meet. In 600 seconds: 100 of harvesters, 20 of brokers, 20 of Postgres.
    """
    chance = random.Random(seed)
    return [
        [_harvester_fault(at, chance, harvesters) for at in _times(chance, seconds, HARVESTER_EVERY)],
        [
            Fault(at, "broker", chance.randrange(brokers), False, chance.uniform(0.0, 8.0))
            for at in _times(chance, seconds, BROKER_EVERY)
        ],
        [
            Fault(at, "postgres", 0, False, chance.choice([0.0, chance.uniform(0.0, 4.0)]))
            for at in _times(chance, seconds, POSTGRES_EVERY)
        ],
    ]


def _times(chance: random.Random, seconds: float, every: float) -> list[float]:
    count = max(1, round(seconds / every))
    return [(number + chance.random()) * seconds / count for number in range(count)]


def _harvester_fault(at: float, chance: random.Random, harvesters: int) -> Fault:
    kinds: list[Kind] = ["kill", "pause", "terminate"]
    [kind] = chance.choices(kinds, weights=[5, 3, 2])
    # Some pauses end before anybody has noticed, some only after all time-outs have run out.
    away = chance.choice([chance.uniform(0.1, 1.0), chance.uniform(1.0, 4.0), chance.uniform(8.0, 15.0)])
    return Fault(at, kind, chance.randrange(harvesters), chance.random() < 0.8, away)
