"""What a leader does next with its outbox table: refresh, read, wait, or sleep until a writer wakes it. No I/O.

A poll is a series of steps, and ends with rows or with a wait:

    begin     refresh: ask the database for commands and for the state of the id sequence, when that is due
    sweep     read a slice of ids below the id watermark, when that is due
    live      where a backlog is there, read live rows before it, as `core.backlog` decides
    read      read from the id watermark on
    idle      wait: shortly while rows come steadily, then longer and longer; or let writers wake us

Call `begin` once for each poll, then `next` for each step. Do what it says, and report the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from outbox_plugin.core.backlog import Backlog, SummaryRequest
from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.id_watermark import IdRange, IdWatermark, SequenceState
from outbox_plugin.core.intervals import (
    CONTROL_ASLEEP_SECONDS,
    CONTROL_BUSY_SECONDS,
    CONTROL_IDLE_SECONDS,
    CONTROL_SEARCH_SECONDS,
    IDLE_FIRST,
    IDLE_LAST,
    LIVE_POLL_SECONDS,
    READ_ASLEEP_SECONDS,
    SLEEP_AFTER_SECONDS,
    STEADY_SECONDS,
    UNCOMMITTED_SECONDS,
)


@dataclass(frozen=True, slots=True)
class Read:
    """Read rows with `ids`; report `read_ended`, or `read_skipped` if nothing can have changed."""

    ids: IdRange
    is_sweep: bool
    is_live: bool = False


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


PollAction = Read | Wait | Arm | Sleep


class _Step(Enum):
    SWEEP = auto()
    LIVE = auto()
    READ = auto()
    IDLE = auto()


class PollSchedule:
    """Decides for one term. `now` is in seconds of a monotonic clock."""

    def __init__(self, now: float, *, can_sleep: bool, can_split: bool) -> None:
        """Begin with a refresh.

        Args:
            now: the time.
            can_sleep: whether writers can wake us, as the trigger of `outbox migrate --wake-up` lets them.
            can_split: whether live rows can be read before a backlog.
        """
        self._can_split = can_split
        self._can_sleep = can_sleep
        self._id_watermark = IdWatermark()
        self._backlog = Backlog()
        self._wants_live = self._wants_others = True
        self._backoff = Backoff(IDLE_FIRST, IDLE_LAST)
        self._step = _Step.SWEEP
        self._began_at = now  # When the present poll began.
        self._rows_at = now  # When the last poll that found rows began.
        self._refreshed_at: float | None = None
        self._paused = False
        self._uncommitted = False  # Whether the poll passed over rows that cannot be seen yet.
        self._busy = False  # Whether the last poll found many rows.
        self._armed = False
        self._has_tried_to_arm = False

    def begin(self, now: float, *, refresh: bool = False, live: bool = True, others: bool = True) -> bool:
        """Begin a poll.

        Args:
            now: the time.
            refresh: whether to refresh even if that is not due.
            live: whether live rows are wanted. It counts while the reads are split.
            others: whether other rows are wanted.

        Returns:
            Whether to refresh first.
        """
        self._step, self._began_at, self._uncommitted = _Step.SWEEP, now, False
        self._wants_live, self._wants_others = live, others
        due = self._refresh_is_due(now)
        if due:
            self._refreshed_at = now
        return due or refresh

    def next(self, now: float) -> PollAction:
        """The next step of the poll."""
        if self._paused:
            return Wait(IDLE_LAST)
        if self._step is _Step.SWEEP:
            self._step = _Step.LIVE
            if self._wants_others and (ids := self._id_watermark.slice_due(now, busy=self._busy)) is not None:
                return Read(ids, is_sweep=True)
        if self._step is _Step.LIVE:
            self._step = _Step.READ
            if self._wants_live and self.is_split:
                return Read(self._id_watermark.live_to_read, is_sweep=False, is_live=True)
        if not self._wants_others or (self._backlog.pauses_reads(now) and not self.is_split):
            return Wait(LIVE_POLL_SECONDS)
        if self._step is _Step.READ:
            self._step = _Step.IDLE
            return Read(self._id_watermark.to_read, is_sweep=False)
        self._busy = False
        return Wait(0.0) if self._id_watermark.sweeping else self._idle()

    def refreshed(self, state: SequenceState, *, paused: bool) -> None:
        """Take in what the database said."""
        self._paused = paused
        if self._id_watermark.update(state):
            self._backlog.sequence_was_set_back()

    @property
    def is_split(self) -> bool:
        """Whether live rows are read before a backlog."""
        return self._id_watermark.is_split

    @property
    def live_rows_above(self) -> int:
        """The id above which the next read of live rows begins."""
        return self._id_watermark.live_to_read.above

    @property
    def more_live_rows_settled(self) -> bool:
        """Whether a read of live rows now lets the next ones begin at a higher id."""
        return self._id_watermark.settled > self.live_rows_above

    @property
    def is_summarising(self) -> bool:
        """Whether the keys of a backlog are being summarised."""
        return self._backlog.is_summarising

    def summary_due(self, now: float) -> SummaryRequest | None:
        """Which keys to summarise now, after a refresh; None where nothing is to be done."""
        return self._backlog.due(now, self._id_watermark)

    def split(self, bound: int) -> bool:
        """The keys up to `bound` have been summarised: read live rows first. Returns False where it is too late."""
        if not self._backlog.may_split(bound, is_split=self.is_split):
            return False
        self._id_watermark.split(bound)
        return True

    def summary_ended(self, now: float) -> None:
        """Take in that the summary has been made, or could not be made."""
        self._backlog.summary_ended(now)

    def read_ended(self, read: Read, last_id: int | None, began: float, now: float, *, many: bool) -> bool:
        """Take in a read. Returns whether the wake-up is armed and must be disarmed, because rows came.

        Args:
            read: what was to be read.
            last_id: the highest id of the rows that it returned; None where it found nothing.
            began: when the read began.
            now: when it ended.
            many: whether it returned many rows.
        """
        self._move_watermark(read, last_id, began, now, many=many)
        if last_id is None:
            return False
        self._busy = many
        self._backoff.succeeded()
        self._rows_at = self._began_at
        return self._disarm()

    def _move_watermark(self, read: Read, last_id: int | None, began: float, now: float, *, many: bool) -> None:
        is_split = self.is_split
        if read.is_sweep:
            self._id_watermark.slice_ended(read.ids, last_id, began, now)
            return
        if read.is_live:
            self._id_watermark.live_read_ended(last_id, now)
        else:
            self._id_watermark.read_ended(last_id, now)
            if is_split and last_id is None:
                self._id_watermark.join()
        if self._can_split and (read.is_live or not is_split):
            self._backlog.read_ended(last_id, now, many=many, is_split=is_split)

    def read_skipped(self) -> None:
        """Take in that a read was skipped: it would walk the same uncommitted rows as the last one of its kind."""
        self._uncommitted = True

    def arm_ended(self, *, armed: bool) -> float:
        """Take in whether writers wake us from now on. They do not while a writer that does not know of it is writing.

        Returns:
            The seconds to wait before the next poll. If the wake-up is armed, poll once more at once: rows may have
            been written before. After the first attempt, ask for commands too: nobody has told us of earlier ones.
        """
        self._armed = armed
        if not self._has_tried_to_arm:
            self._has_tried_to_arm = True
            self._refreshed_at = None
        return 0.0 if armed else self._backoff.wait()

    def woken(self, now: float) -> bool:
        """Take in that a writer has woken us, perhaps for a command. Returns whether the wake-up must be disarmed."""
        self._refreshed_at = None
        self._rows_at = now
        return self._disarm()

    def read_from_beginning(self) -> None:
        """Read rows again that were passed over, because keys were released or rows are to be marked again."""
        self._id_watermark.reset()

    def _refresh_is_due(self, now: float) -> bool:
        idle = now - self._rows_at > CONTROL_IDLE_SECONDS
        seconds = CONTROL_ASLEEP_SECONDS if self._armed else CONTROL_IDLE_SECONDS if idle else CONTROL_BUSY_SECONDS
        if self._id_watermark.grows_in_bulk or self._backlog.is_searching(now):
            seconds = CONTROL_SEARCH_SECONDS
        return self._refreshed_at is None or now - self._refreshed_at >= seconds

    def _idle(self) -> PollAction:
        without_rows = self._began_at - self._rows_at
        if without_rows < STEADY_SECONDS:
            return Wait(IDLE_FIRST)
        if not self._can_sleep or without_rows < SLEEP_AFTER_SECONDS:
            return Wait(UNCOMMITTED_SECONDS if self._uncommitted else self._backoff.wait())
        return Sleep(READ_ASLEEP_SECONDS) if self._armed else Arm()

    def _disarm(self) -> bool:
        armed, self._armed = self._armed, False
        return armed
