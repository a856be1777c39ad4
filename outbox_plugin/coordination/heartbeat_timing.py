"""How often instances write heartbeats, and how much of the log a new instance reads."""

from __future__ import annotations

from dataclasses import dataclass

HEARTBEAT_INTERVAL_SECONDS = 10.0  # Marshal's own is 60: the same is needed only within a group.


@dataclass(frozen=True, slots=True)
class HeartbeatTiming:
    """Times in seconds. After `idle` seconds without a poll, an instance releases its partitions."""

    interval: float
    idle: float = 300.0

    @property
    def beat(self) -> float:
        """Between two heartbeats of ours: half an interval, because a heartbeat may come late."""
        return self.interval / 2

    @property
    def lookback(self) -> float:
        """How much of the log shows who holds what: every claim is repeated several times in it."""
        return max(30.0, 12 * self.interval)

    @property
    def renewal(self) -> float:
        """Between two repetitions of a claim."""
        return 3 * self.interval
