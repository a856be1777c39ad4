"""Polls the outbox for one term, in either delivery, as `core.poll_schedule` decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outbox_plugin.core.intervals import MANY_ROWS
from outbox_plugin.core.low_watermark import IdRange
from outbox_plugin.core.poll_schedule import Action, Arm, PollSchedule, Read, Sleep, Wait
from outbox_plugin.core.ports import Control, ReadRequest, WakeUp
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.unchanged_reads import UnchangedReads
from outbox_plugin.relay.events import Observer, RowsRead
from outbox_plugin.relay.stages import Stages


@dataclass(frozen=True, slots=True)
class Source:
    """What a delivery does for the poller. All but `rows_are_released` may raise StoreUnavailable.

    Args:
        control: asks the database for commands and for the state of the id sequence. The delivery takes in which keys
            are parked. Returns the answer, and whether keys were released.
        rows_are_released: whether rows that earlier polls passed over are wanted at the time given, because keys that
            were held back go on, or rows are to be marked anew.
        request: what to read of a range of ids.
        read: reads, or marks and reads, the rows of a request.
        snapshot: which transactions have ended, as a text that changes when one does.
    """

    control: Callable[[], tuple[Control, bool]]
    rows_are_released: Callable[[float], bool]
    request: Callable[[IdRange], ReadRequest]
    read: Callable[[ReadRequest], Sequence[OutboxRow]]
    snapshot: Callable[[], str]


class Poller:
    """Belongs to the stage that reads; only `interrupt` may be called by another thread."""

    def __init__(self, shard: int, source: Source, stages: Stages, wake_up: WakeUp | None, observe: Observer) -> None:
        """Nothing is polled yet.

        Args:
            shard: for the events that are observed.
            source: what the delivery does.
            stages: the term's stages: a wait ends when they stop.
            wake_up: lets writers wake us; None where the trigger is not installed.
            observe: is told of each read.
        """
        self._shard = shard
        self._source = source
        self._stages = stages
        self._wake_up = wake_up
        self._observe = observe
        self._now = stages.runtime.now
        self._schedule = PollSchedule(self._now(), can_sleep=wake_up is not None)
        self._unchanged = UnchangedReads()
        self.found_many = False  # Whether the last poll found so many rows that the next one is worth an early start.

    def poll(self, *, refresh: bool = False) -> Sequence[OutboxRow]:
        """The next rows; none after a wait. `refresh`: ask the database for commands first, due or not.

        Raises:
            StoreUnavailable: Postgres does not do as asked.
        """
        self.found_many = False
        now = self._now()
        if self._schedule.begin(now, refresh=refresh):
            self._refresh()
        if self._source.rows_are_released(now):
            self._read_from_beginning()
        while isinstance(action := self._schedule.next(now), Read):
            if rows := self._read(action):
                return rows
        self._rest(action)
        return ()

    def interrupt(self) -> None:
        """The term is to end: end a sleep."""
        if self._wake_up is not None:
            self._wake_up.interrupt()

    def _read_from_beginning(self) -> None:
        self._schedule.read_from_beginning()
        self._unchanged.forget()

    def _refresh(self) -> None:
        control, released = self._source.control()
        self._schedule.refreshed(control.sequence, paused=control.paused)
        if released:
            self._read_from_beginning()

    def _read(self, action: Read) -> Sequence[OutboxRow]:
        request = self._source.request(action.ids)
        if not action.is_sweep and self._would_find_nothing(request):
            self._schedule.read_skipped()
            return ()
        began = self._now()
        rows = self._source.read(request)
        now = self._now()
        self._observe(RowsRead(self._shard, len(rows), now - began))
        if not action.is_sweep:
            self._unchanged.read(request, len(rows), now - began)
        self.found_many = len(rows) >= min(MANY_ROWS, request.limit)
        if self._schedule.read_ended(action, len(rows), rows[-1].id if rows else None, began, now):
            self._disarm()
        return rows

    def _would_find_nothing(self, request: ReadRequest) -> bool:
        return self._unchanged.may_skip(request) and self._unchanged.is_unchanged(self._source.snapshot())

    def _rest(self, action: Action) -> None:
        match action:
            case Wait(seconds):
                self._wait(seconds)
            case Arm():
                self._wait(self._schedule.arm_ended(armed=self._wake_up is not None and self._wake_up.arm()))
            case Sleep(seconds):
                if self._wake_up is not None and self._wake_up.wait(seconds) and self._schedule.woken(self._now()):
                    self._disarm()
            case _:
                raise AssertionError(f"a poll does not end with {action}")

    def _wait(self, seconds: float) -> None:
        if seconds:
            self._stages.rest(seconds)

    def _disarm(self) -> None:
        if self._wake_up is not None:
            self._wake_up.disarm()
