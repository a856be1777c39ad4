"""What the schedules of `inboxes` are drawn from: a plan, and the dice that decide what fails."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from outbox_plugin.core.memory_limit import MemoryLimit
from outbox_plugin.inbox.retry import Retry

TOPICS = {"orders": 2, "payments": 1}  # How many partitions each may have.
GROUP = "billing"
KEEP_SECONDS = 1_000.0
STEP_SECONDS = 0.1
RETRY = Retry(attempts=3, first_seconds=0.5, most_seconds=5.0)
ROOMY = MemoryLimit(records=20_000, size=64_000_000)
# A record takes about 670 bytes. So the third is reached by the bytes, and the second by the number of records.
LIMITS = (ROOMY, MemoryLimit(records=12, size=64_000_000), MemoryLimit(records=20_000, size=6_000))
STEPS = {
    "append": 8,
    "fetch": 20,
    "handle": 20,
    "commit": 12,
    "tick": 10,
    "leader": 2,
    "cut": 3,
    "delete": 2,
    "compact": 3,
    "recreate": 1,
    "kill": 2,
    "stop": 1,
    "move": 4,
    "lose": 2,
    "start": 4,
    "expire": 3,
    "pass time": 4,
    "retry": 4,
}
NEEDED = {"append", "fetch", "handle", "commit", "tick", "start"}


@dataclass(frozen=True)
class Plan:
    """What a schedule is like.

    Attributes:
        steps: how many it has.
        weights: how likely each kind of steps is.
        failures: how often a request fails.
        silence: how often one for a topic's id does.
        partitions: how many there are; the first topic has two of them.
        limit: how much an inbox may hold in memory.
        bad: which part of the records fails until an operator has mended what they need.
        in_batches: the handler takes lists of records.
    """

    steps: int = 150
    weights: Mapping[str, int] = field(default_factory=lambda: STEPS)
    failures: float = 0.1
    silence: float = 0.0
    partitions: int = 1
    limit: MemoryLimit = ROOMY
    bad: float = 0.0
    in_batches: bool = False

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """The plan of a seed: each leaves some kinds of steps out, so that they do not drown each other."""
        dice = random.Random(seed)
        weights = {kind: weight for kind, weight in STEPS.items() if kind in NEEDED or dice.random() < 0.7}
        weights["handle"] = dice.choice((20, 20, 5))  # With slow handlers, records wait.
        return cls(
            steps=dice.randint(20, 250),
            weights=weights,
            failures=dice.choice((0.0, 0.0, 0.1, 0.4)),
            silence=dice.choice((0.0, 0.3)),
            partitions=dice.choice((1, 1, 1, 2, 3)),
            limit=dice.choice(LIMITS),
            bad=dice.choice((0.0, 0.0, 0.1, 0.3)),
            in_batches=dice.random() < 0.3,
        )


class Chance:
    """The dice of a schedule, its clock, and its trace. Nothing fails by chance once all is `well`."""

    def __init__(self, seed: int, plan: Plan, *, tell: bool) -> None:
        self.plan = plan
        self.dice = random.Random(f"{seed}/run")
        self.now = 1_000_000.0
        self.well = False
        self.trace: list[str] = []
        self._tell = tell

    def say(self, text: str) -> None:
        """Add a line to the trace, if somebody will read it."""
        if self._tell:
            self.trace.append(text)

    def fails(self) -> bool:
        """Whether a request fails now."""
        return not self.well and self.dice.random() < self.plan.failures

    def may_fail(self, error: Exception) -> None:
        """Raise the error if a request fails now."""
        if self.fails():
            self.say(f"fails: {error}")
            raise error

    def is_silent(self) -> bool:
        """Whether Kafka does not return a topic's id now."""
        return self.fails() or (not self.well and self.dice.random() < self.plan.silence)
