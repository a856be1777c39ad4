"""Which faults a chaos run injects, and when: decided by a seed before the run. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Actor = Literal["harvesters", "brokers", "postgres", "network", "clients"]
Kind = Literal[
    "kill",
    "pause",
    "terminate",
    "broker",
    "postgres",
    "failover",
    "network cut",
    "network held",
    "network discarded",
    "network half-open",
    "bad headers",
    "bad topic",
    "bad size",
    "table rewrite",
    "table update",
    "table vacuum",
]
EVERY_SECONDS: Mapping[Actor, float] = {
    "harvesters": 6.0,
    "brokers": 30.0,
    "postgres": 20.0,
    "network": 20.0,
    "clients": 10.0,
}
NETWORK_KINDS: tuple[Kind, ...] = ("network cut", "network held", "network discarded", "network half-open")
TABLE_KINDS: tuple[Kind, ...] = ("table rewrite", "table update", "table vacuum")
CLIENT_KINDS: tuple[Kind, ...] = ("bad headers", "bad topic", "bad size", *TABLE_KINDS)
SOAK_SECONDS, SOAK_EVERY = 1800.0, 10.0
LONGEST_NETWORK_FAULT_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, `at` seconds after the beginning.

    `victim` numbers the harvester or broker; with `leader`, the harvester that leads is meant, if one does.
    `seconds`: how long it lasts: how long a harvester is paused, a server is away, a network disturbed.
    `target`: of a network fault, the server that the harvester cannot reach: 0 is Postgres, 1 all brokers, from 2 on
    a single broker. `directions`: of a network fault, which way is affected: 0 to the server, 1 to the client, 2 both.
    """

    at: float
    kind: Kind
    victim: int = 0
    leader: bool = False
    seconds: float = 0.0
    target: int = 0
    directions: int = 2


def plan(seed: int, seconds: float, harvesters: int, brokers: int) -> dict[Actor, list[Fault]]:
    """The faults of a run of `seconds`, by who injects them, each in their order.

    Each actor has one fault in every span of its length, at any time in it. Actors know nothing of each other, so their
    faults meet; an actor's own follow each other. In 600 seconds: 100 of harvesters, 20 of brokers, 30 of Postgres, 30
    of the network, 60 of clients. A run of half an hour or more is a soak: ten times as rare.

    A kind that comes in turn comes at least once, also in the shortest run.

    Args:
        seed: decides the faults and their times.
        seconds: how long the run takes.
        harvesters: how many harvesters run.
        brokers: how many brokers run.
    """
    chance = random.Random(seed)
    spread = SOAK_EVERY if seconds >= SOAK_SECONDS else 1.0
    faults: dict[Actor, Callable[[float, int], Fault]] = {
        "harvesters": lambda at, _: _harvester_fault(at, chance, harvesters),
        "brokers": lambda at, _: Fault(at, "broker", chance.randrange(brokers), seconds=chance.uniform(0.0, 8.0)),
        "postgres": lambda at, number: _postgres_fault(at, number, chance),
        "network": lambda at, number: _network_fault(at, number, chance, seconds, harvesters, brokers),
        "clients": lambda at, number: Fault(
            at, CLIENT_KINDS[number % len(CLIENT_KINDS)], seconds=chance.uniform(0.0, 4.0)
        ),
    }
    least: dict[Actor, int] = {"postgres": 2, "network": len(NETWORK_KINDS), "clients": len(CLIENT_KINDS)}
    return {
        actor: [
            make(at, number)
            for number, at in enumerate(_times(chance, seconds, EVERY_SECONDS[actor] * spread, least.get(actor, 1)))
        ]
        for actor, make in faults.items()
    }


def _times(chance: random.Random, seconds: float, every: float, least: int) -> list[float]:
    count = max(least, round(seconds / every))
    return [(number + chance.random()) * seconds / count for number in range(count)]


def _harvester_fault(at: float, chance: random.Random, harvesters: int) -> Fault:
    kinds: list[Kind] = ["kill", "pause", "terminate"]
    [kind] = chance.choices(kinds, weights=[5, 3, 2])
    # Some pauses end before anybody has noticed, some only after all time-outs have run out.
    away = chance.choice([chance.uniform(0.1, 1.0), chance.uniform(1.0, 4.0), chance.uniform(8.0, 15.0)])
    return Fault(at, kind, chance.randrange(harvesters), chance.random() < 0.8, away)


def _postgres_fault(at: float, number: int, chance: random.Random) -> Fault:
    """Every third is a fail-over; every other one stops Postgres immediately and starts it again."""
    kind: Kind = "failover" if number % 3 == 1 else "postgres"
    return Fault(at, kind, seconds=chance.choice([0.0, chance.uniform(0.0, 4.0)]))


def _network_fault(
    at: float, number: int, chance: random.Random, seconds: float, harvesters: int, brokers: int
) -> Fault:
    longest = min(LONGEST_NETWORK_FAULT_SECONDS, seconds / 4)
    return Fault(
        at,
        NETWORK_KINDS[number % len(NETWORK_KINDS)],
        victim=chance.randrange(harvesters),
        leader=chance.random() < 0.8,
        seconds=chance.choice([chance.uniform(0.0, 0.05), chance.uniform(0.05, 0.3), chance.uniform(0.3, 1.0)])
        * longest,
        target=chance.choice([0, 0, 1, 1, chance.randrange(2, 2 + brokers)]),
        directions=chance.randrange(3),
    )
