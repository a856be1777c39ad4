"""What a leader does next with its outbox table: refresh, read, wait, or sleep until a writer wakes it. No I/O.

A poll is a series of steps, and ends with rows or with a wait:

    begin     refresh: ask the database for commands and for the state of the id sequence, when that is due
    sweep     read a slice of ids below the low watermark, when that is due
    read      read from the low watermark on
    idle      wait: shortly while rows come steadily, then longer and longer; or let writers wake us

Call `begin` once for each poll, then `next` for each step. Do what it says, and report the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.intervals import (
    CONTROL_ASLEEP_SECONDS,
    CONTROL_BUSY_SECONDS,
    CONTROL_IDLE_SECONDS,
    IDLE_FIRST,
    IDLE_LAST,
    MANY_ROWS,
    READ_ASLEEP_SECONDS,
    SLEEP_AFTER_SECONDS,
    STEADY_SECONDS,
    UNCOMMITTED_SECONDS,
)
from outbox_plugin.core.low_watermark import IdRange, LowWatermark, SequenceState


@dataclass(frozen=True, slots=True)
class Read:
    """Read rows with `ids`; report `read_ended`, or `read_skipped` if nothing can have changed."""

    ids: IdRange
    is_sweep: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for `seconds`, perhaps 0; the poll has ended without rows."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Arm:
    """Ask writers to wake us; report `arm_ended`. The poll has ended without rows."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep for up to `seconds` until a writer wakes us; report `woken` if one did. The poll has ended without rows."""

    seconds: float


Action = Read | Wait | Arm | Sleep


class _Step(Enum):
    SWEEP = auto()
    READ = auto()
    IDLE = auto()


class PollSchedule:
    """Decides for one term. `now` is in seconds of a monotonic clock."""

    def __init__(self, now: float, *, can_sleep: bool) -> None:
        """Begin with a refresh.

        Args:
            now: the time.
            can_sleep: whether writers can wake us, as the trigger of `outbox migrate --wake-up` lets them.
        """
        self._can_sleep = can_sleep
        self._low_watermark = LowWatermark()
        self._backoff = Backoff(IDLE_FIRST, IDLE_LAST)
        self._step = _Step.SWEEP
        self._began_at = now  # When the present poll began.
        self._rows_at = now  # When the last poll that found rows began.
        self._refreshed_at: float | None = None
        self._paused = False
        self._uncommitted = False  # Whether the poll passed over rows that cannot be seen yet.
        self._busy = False  # Whether the last poll found many rows.
        self._armed = False

    def begin(self, now: float, *, refresh: bool = False) -> bool:
        """Begin a poll. Returns whether to refresh first, because that is due or because of `refresh`."""
        self._step, self._began_at, self._uncommitted = _Step.SWEEP, now, False
        due = self._refresh_is_due(now)
        if due:
            self._refreshed_at = now
        return due or refresh

    def next(self, now: float) -> Action:
        """The next step of the poll."""
        if self._paused:
            return Wait(IDLE_LAST)
        if self._step is _Step.SWEEP:
            self._step = _Step.READ
            if (ids := self._low_watermark.slice_due(now, busy=self._busy)) is not None:
                return Read(ids, is_sweep=True)
        if self._step is _Step.READ:
            self._step = _Step.IDLE
            return Read(self._low_watermark.to_read, is_sweep=False)
        self._busy = False
        return Wait(0.0) if self._low_watermark.sweeping else self._idle()

    def refreshed(self, state: SequenceState, *, paused: bool) -> None:
        """Take in what the database said."""
        self._paused = paused
        self._low_watermark.update(state)

    def read_ended(self, read: Read, rows: int, last_id: int | None, began: float, now: float) -> bool:
        """Take in a read. Returns whether the wake-up is armed and must be disarmed, because rows came.

        Args:
            read: what was to be read.
            rows: how many rows it returned; if any, the poll has ended.
            last_id: the highest of their ids; None where there is none.
            began: when the read began.
            now: when it ended.
        """
        if read.is_sweep:
            self._low_watermark.slice_ended(read.ids, last_id, began, now)
        else:
            self._low_watermark.read_ended(last_id, now)
        if not rows:
            return False
        self._busy = rows >= MANY_ROWS
        self._backoff.succeeded()
        self._rows_at = self._began_at
        return self._disarm()

    def read_skipped(self) -> None:
        """The read was not done: it would pass over the same uncommitted rows as the last one."""
        self._uncommitted = True

    def arm_ended(self, *, armed: bool) -> float:
        """Take in whether writers wake us from now on; if not, a writer is at work that would not.

        Returns:
            The seconds to wait before the next poll. An armed wake-up is polled once more at once, for what was written
            before writers knew.
        """
        self._armed = armed
        return 0.0 if armed else self._backoff.wait()

    def woken(self, now: float) -> bool:
        """A writer has woken us, perhaps for a command. Returns whether the wake-up must be disarmed."""
        self._refreshed_at = None
        self._rows_at = now
        return self._disarm()

    def read_from_beginning(self) -> None:
        """Rows that were passed over are wanted: keys were released, or rows are to be marked anew."""
        self._low_watermark.reset()

    def _refresh_is_due(self, now: float) -> bool:
        idle = now - self._rows_at > CONTROL_IDLE_SECONDS
        seconds = CONTROL_ASLEEP_SECONDS if self._armed else CONTROL_IDLE_SECONDS if idle else CONTROL_BUSY_SECONDS
        return self._refreshed_at is None or now - self._refreshed_at >= seconds

    def _idle(self) -> Action:
        without_rows = self._began_at - self._rows_at
        if without_rows < STEADY_SECONDS:
            return Wait(IDLE_FIRST)
        if not self._can_sleep or without_rows < SLEEP_AFTER_SECONDS:
            return Wait(UNCOMMITTED_SECONDS if self._uncommitted else self._backoff.wait())
        return Sleep(READ_ASLEEP_SECONDS) if self._armed else Arm()

    def _disarm(self) -> bool:
        armed, self._armed = self._armed, False
        return armed
