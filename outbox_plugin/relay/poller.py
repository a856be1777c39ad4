"""Polls the outbox for one term, in either delivery, as `core.poll_schedule` decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outbox_plugin.core.intervals import MANY_ROWS
from outbox_plugin.core.poll_schedule import Arm, PollAction, PollSchedule, Read, Sleep, Wait
from outbox_plugin.core.postgres_ports import Control, ReadRequest, WakeUp
from outbox_plugin.core.repeated_empty_reads import RepeatedEmptyReads
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.relay.events import Observer, RowsRead
from outbox_plugin.relay.live_rows import Found, LiveRows
from outbox_plugin.relay.task_group import TaskGroup
from outbox_plugin.relay.timed_calls import AnswerWait


@dataclass(frozen=True, slots=True)
class Source:
    """What a delivery does for the poller. All but `rows_are_released` may raise StoreUnavailable.

    Args:
        control: asks the database for commands and for the state of the id sequence. The delivery takes in which keys
            are parked. Returns the answer, and whether keys were released.
        rows_are_released: whether rows that earlier polls passed over are wanted at the time given, because keys that
            were held back go on, or rows are to be marked again.
        request: what to read, in detail.
        read: reads, or marks and reads, the rows of a request.
        snapshot: which transactions have ended, as a text that changes when one does.
        live_rows: what reads live rows before a backlog; None in a delivery that reads all rows in the order of their
            ids.
    """

    control: Callable[[], tuple[Control, bool]]
    rows_are_released: Callable[[float], bool]
    request: Callable[[Read], ReadRequest]
    read: Callable[[ReadRequest], Sequence[OutboxRow]]
    snapshot: Callable[[], str]
    live_rows: LiveRows | None = None


class Poller:
    """Belongs to the stage that reads; only `interrupt` may be called by another thread."""

    def __init__(self, shard: int, source: Source, tasks: TaskGroup, wake_up: WakeUp | None, observe: Observer) -> None:
        """Nothing is polled yet.

        Args:
            shard: for the events that are observed.
            source: what the delivery does.
            tasks: those of the term; a wait ends when they are to stop.
            wake_up: lets writers wake us; None where the trigger is not installed.
            observe: is told of each read.
        """
        self._shard = shard
        self._source = source
        self._live_rows = source.live_rows
        self._tasks = tasks
        self._wake_up = wake_up
        self._observe = observe
        self._now = tasks.runtime.now
        self.answer_wait = AnswerWait(tasks.runtime)  # For Postgres.
        self._schedule = PollSchedule(
            self._now(), can_sleep=wake_up is not None, can_split=source.live_rows is not None
        )
        self._empty_reads = {is_live: RepeatedEmptyReads() for is_live in (False, True)}
        self.found_many = False  # Whether the last poll found so many rows that the next one is worth an early start.
        self.found_live = False  # Whether the rows of the last poll are live rows that go before a backlog.

    @property
    def is_split(self) -> bool:
        """Whether live rows are read before a backlog."""
        return self._schedule.is_split

    @property
    def more_live_rows_settled(self) -> bool:
        """Whether a read of live rows now lets the next ones begin at a higher id."""
        return self._schedule.more_live_rows_settled

    @property
    def is_summarising(self) -> bool:
        """Whether the keys of a backlog are being summarised."""
        return self._schedule.is_summarising

    def poll(self, *, refresh: bool = False, live: bool = True, others: bool = True) -> Sequence[OutboxRow]:
        """The next rows; none after a wait.

        Args:
            refresh: whether to ask the database for commands first, even if that is not due.
            live: whether live rows are wanted, where they go before a backlog.
            others: whether other rows are wanted.

        Raises:
            StoreUnavailable: Postgres does not do as asked.
        """
        now = self._now()
        if others:
            self.found_many = False
        if self._schedule.begin(now, refresh=refresh, live=live, others=others):
            self._refresh()
        if self._source.rows_are_released(now):
            self._read_from_beginning()
        if self._live_rows is not None:
            self._follow_split(self._live_rows)
        while isinstance(action := self._schedule.next(now), Read):
            if rows := self._read(action):
                self.found_live = action.is_live
                return rows
        self._rest(action)
        return ()

    def interrupt(self) -> None:
        """The term is to end: end a sleep."""
        if self._wake_up is not None:
            self._wake_up.interrupt()

    def _read_from_beginning(self) -> None:
        self._schedule.read_from_beginning()
        for empty_reads in self._empty_reads.values():
            empty_reads.forget()

    def _refresh(self) -> None:
        with self.answer_wait:
            control, released = self._source.control()
        self._schedule.refreshed(control.sequence, paused=control.paused)
        if released:
            self._read_from_beginning()
        if self._live_rows is not None and (request := self._schedule.summary_due(self._now())) is not None:
            self._live_rows.summarise_keys(request)

    def _follow_split(self, live_rows: LiveRows) -> None:
        """Let live rows go first from now on, or no longer, as the schedule decides."""
        if (ended := live_rows.take_summary()) is not None:
            self._schedule.summary_ended(self._now())
            if ended.summary is not None and self._schedule.split(ended.summary.bound):
                live_rows.begin(ended.summary)
        if live_rows.in_use and not self._schedule.is_split:
            live_rows.end()

    def _read(self, action: Read) -> Sequence[OutboxRow]:
        request = self._source.request(action)
        empty_reads = self._empty_reads[action.is_live]
        if not action.is_sweep and empty_reads.may_skip(request) and empty_reads.is_unchanged(self._snapshot()):
            self._schedule.read_skipped()
            return ()
        began = self._now()
        found = self._find(action, request)
        now = self._now()
        self._observe(RowsRead(self._shard, len(found.rows), now - began))
        if not action.is_sweep:
            empty_reads.read(request, found.number, now - began)
        many = found.number >= min(MANY_ROWS, request.limit)
        if not action.is_live:
            self.found_many = many
        if self._schedule.read_ended(action, found.last_id, began, now, many=many):
            self._disarm()
        if action.is_live and self._live_rows is not None:
            self._live_rows.forget_up_to(self._schedule.live_rows_above)
        return found.rows

    def _snapshot(self) -> str:
        with self.answer_wait:
            return self._source.snapshot()

    def _find(self, action: Read, request: ReadRequest) -> Found:
        with self.answer_wait:
            if action.is_live and self._live_rows is not None:
                return self._live_rows.read(request)
            return Found.all(self._source.read(request))

    def _rest(self, action: PollAction) -> None:
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
            self._tasks.rest(seconds)

    def _disarm(self) -> None:
        if self._wake_up is not None:
            self._wake_up.disarm()
