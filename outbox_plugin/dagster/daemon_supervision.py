"""Decides whether a sensor tick starts the harvester's daemon. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from outbox_plugin.errors import InvalidSetting

SENSOR_LOOP_SECONDS = 5.0  # Dagster's daemon evaluates sensors at this interval; none ticks more often.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
FORGIVEN_AFTER_SECONDS = 900.0
LONGEST_SECONDS = 31_536_000.0  # A year. The most that a lease or a wait may be set to; `inf` is refused, too.


class DaemonAction(Enum):
    """What a tick does about the daemon."""

    START = auto()
    LEAVE = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class DaemonState:
    """The daemon on this host, as a tick sees it.

    Attributes:
        running: whether it runs.
        starts: when it was started before, in seconds since the epoch.
        now: the time of the tick, in seconds since the epoch.
    """

    running: bool
    starts: tuple[float, ...]
    now: float


RELEASED = 0  # The lease's time where somebody has ended it.


@dataclass(slots=True)
class LeaseClock:
    """Measures a lease by the daemon's own monotonic clock, so that a change of the system's time does not end it.

    A tick sets the time of the lease's file to its own time. The daemon only asks whether that time has changed, and
    counts the seconds since then.

    Attributes:
        seconds: how long the daemon runs without a renewal.
    """

    seconds: float
    _renewed: int | None = None
    _since: float | None = None

    def has_run_out(self, renewed: int | None, now: float) -> bool:
        """Whether the lease has run out.

        Args:
            renewed: the time of the lease's file, in nanoseconds since the epoch; None if it cannot be read now.
            now: by the monotonic clock, in seconds.
        """
        if renewed == RELEASED:
            return True
        if self._since is None or renewed not in (None, self._renewed):
            self._renewed, self._since = renewed, now
        return now - self._since > self.seconds


def check_lease(lease_seconds: float, interval_seconds: float) -> None:
    """Check that a lease outlives a missed tick, and that it ends some day.

    Args:
        lease_seconds: how long the daemon runs without a tick.
        interval_seconds: the shortest time between two ticks.

    Raises:
        InvalidSetting: it does not. The daemon would end between ticks, and each end is a takeover; or it would never
            end.
    """
    if not lease_seconds <= LONGEST_SECONDS:
        raise InvalidSetting(f"lease_seconds: expected {LONGEST_SECONDS:.0f} or less (given: {lease_seconds:g})")
    shortest = 2 * max(interval_seconds, SENSOR_LOOP_SECONDS)
    if lease_seconds < shortest:
        raise InvalidSetting(
            f"lease_seconds: expected {shortest:g} or more, with a sensor that ticks every {interval_seconds:g} s: "
            f"the daemon would end between ticks (given: {lease_seconds:g})"
        )


def decide(daemon: DaemonState) -> DaemonAction:
    """Leave a running daemon alone. Start one that is not there, after a pause that grows with its recent starts."""
    if daemon.running:
        return DaemonAction.LEAVE
    lately = recent(daemon.starts, daemon.now)
    if not lately:
        return DaemonAction.START
    pause = min(FIRST_PAUSE_SECONDS * 2 ** (len(lately) - 1), LONGEST_PAUSE_SECONDS)
    return DaemonAction.START if daemon.now - lately[-1] >= pause else DaemonAction.WAIT


def recent(starts: tuple[float, ...], now: float) -> tuple[float, ...]:
    """The starts of the last 15 minutes, oldest first."""
    return tuple(sorted(start for start in starts if 0 <= now - start < FORGIVEN_AFTER_SECONDS))
