"""Whether a sensor tick starts the harvester's daemon. Pure: what is seen comes in, a decision goes out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from outbox_plugin.errors import InvalidSetting

SENSOR_LOOP_SECONDS = 5.0  # Dagster's daemon looks at sensors so often, so none ticks more often.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
FORGIVEN_AFTER_SECONDS = 900.0


class Decision(Enum):
    """What a tick does."""

    START = auto()
    LEAVE = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a tick sees of the daemon on its host. `starts`: when it was started before, in seconds like `now`."""

    running: bool
    starts: tuple[float, ...]
    now: float


def check_lease(lease_seconds: float, interval_seconds: float) -> None:
    """Check that a lease outlives one tick that is missed.

    Args:
        lease_seconds: how long the daemon runs without a tick.
        interval_seconds: the shortest time between two ticks.

    Raises:
        InvalidSetting: it does not: the daemon would end between ticks, and each end is a takeover.
    """
    shortest = 2 * max(interval_seconds, SENSOR_LOOP_SECONDS)
    if lease_seconds < shortest:
        raise InvalidSetting(
            f"lease_seconds: expected {shortest:g} or more, with a sensor that ticks every {interval_seconds:g} s: "
            f"the daemon would end between ticks (given: {lease_seconds:g})"
        )


def decide(seen: Seen) -> Decision:
    """Leave a running daemon alone; start one that is not there, more slowly the more often it has ended lately."""
    if seen.running:
        return Decision.LEAVE
    lately = recent(seen.starts, seen.now)
    if not lately:
        return Decision.START
    pause = min(FIRST_PAUSE_SECONDS * 2 ** (len(lately) - 1), LONGEST_PAUSE_SECONDS)
    return Decision.START if seen.now - lately[-1] >= pause else Decision.WAIT


def recent(starts: tuple[float, ...], now: float) -> tuple[float, ...]:
    """The starts that still count, oldest first."""
    return tuple(sorted(start for start in starts if 0 <= now - start < FORGIVEN_AFTER_SECONDS))
