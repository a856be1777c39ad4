"""How often instances speak, and how much of the log says who holds what."""

from __future__ import annotations

from dataclasses import dataclass

HEARTBEAT_INTERVAL_SECONDS = 10.0  # Marshal's own is 60: the same is needed only within a group.


@dataclass(frozen=True, slots=True)
class HeartbeatTiming:
    """Seconds. `idle`: a user who polls no more for so long is taken to have gone."""

    interval: float
    idle: float = 300.0

    @property
    def beat(self) -> float:
        """Between two heartbeats of ours: more often than once an interval, as one may come late."""
        return self.interval / 2

    @property
    def lookback(self) -> float:
        """So much of the log says who holds what: claims are repeated several times in it."""
        return max(30.0, 12 * self.interval)

    @property
    def renewal(self) -> float:
        """Between two repetitions of a claim."""
        return 3 * self.interval
