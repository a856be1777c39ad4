"""What a leader does next: each line of the schedule, with a clock of the test's own."""

from __future__ import annotations

import pytest

from outbox_plugin.core.backlog import PAUSE_SECONDS
from outbox_plugin.core.id_watermark import BEGINNING, BULK_IDS, SWEEP_SECONDS, IdRange, SequenceState
from outbox_plugin.core.intervals import (
    CONTROL_ASLEEP_SECONDS,
    CONTROL_BUSY_SECONDS,
    CONTROL_SEARCH_SECONDS,
    IDLE_FIRST,
    IDLE_LAST,
    LIVE_POLL_SECONDS,
    LONG_POLL_SECONDS,
    READ_ASLEEP_SECONDS,
    SLEEP_AFTER_SECONDS,
    STEADY_SECONDS,
    UNCOMMITTED_SECONDS,
)
from outbox_plugin.core.poll_schedule import Arm, PollAction, PollSchedule, Read, Sleep, Wait
from outbox_plugin.core.postgres_ports import ReadRequest
from outbox_plugin.core.repeated_empty_reads import RepeatedEmptyReads

SETTLED = SequenceState(100, frozenset())
EVERYTHING = Read(IdRange(BEGINNING), is_sweep=False)


def a_schedule(*, can_sleep: bool = False, state: SequenceState = SETTLED, paused: bool = False) -> PollSchedule:
    """One that has refreshed, at second 0."""
    schedule = PollSchedule(0.0, can_sleep=can_sleep, can_split=True)
    assert schedule.begin(0.0)
    schedule.refreshed(state, paused=paused)
    return schedule


def poll_in_vain(schedule: PollSchedule, now: float) -> PollAction:
    """A poll whose reads find nothing; returns what it ends with."""
    schedule.begin(now)
    while isinstance(action := schedule.next(now), Read):
        assert not schedule.read_ended(action, None, now, now, many=False)
    return action


def test_a_read_begins_at_the_beginning_and_goes_on_above_the_id_watermark() -> None:
    schedule = a_schedule()
    assert schedule.next(0.0) == EVERYTHING
    assert not schedule.read_ended(EVERYTHING, 40, 0.0, 0.0, many=False)
    schedule.begin(0.1)
    assert schedule.next(0.1) == Read(IdRange(40), is_sweep=False)


def test_it_refreshes_often_while_rows_come_seldom_while_asleep_and_whenever_it_is_asked_to() -> None:
    schedule = a_schedule(can_sleep=True)
    assert not schedule.begin(CONTROL_BUSY_SECONDS / 2)
    assert schedule.begin(CONTROL_BUSY_SECONDS / 2, refresh=True)
    assert schedule.begin(CONTROL_BUSY_SECONDS)
    schedule.arm_ended(armed=True)
    assert schedule.begin(CONTROL_BUSY_SECONDS)
    assert not schedule.begin(CONTROL_ASLEEP_SECONDS)
    assert schedule.begin(CONTROL_BUSY_SECONDS + CONTROL_ASLEEP_SECONDS)


def test_a_paused_outbox_is_not_read() -> None:
    assert a_schedule(paused=True).next(0.0) == Wait(IDLE_LAST)


def test_waits_are_short_while_rows_come_steadily_and_grow_afterwards() -> None:
    schedule = a_schedule()
    assert poll_in_vain(schedule, STEADY_SECONDS / 2) == Wait(IDLE_FIRST)
    waits = [poll_in_vain(schedule, STEADY_SECONDS) for _ in range(20)]
    assert waits[:3] == [Wait(IDLE_FIRST), Wait(2 * IDLE_FIRST), Wait(4 * IDLE_FIRST)]
    assert waits[-1] == Wait(IDLE_LAST)


def test_rows_make_the_waits_short_again() -> None:
    schedule = a_schedule()
    for _ in range(5):
        poll_in_vain(schedule, 1.0)
    schedule.begin(1.0)
    read = schedule.next(1.0)
    assert isinstance(read, Read)
    schedule.read_ended(read, 101, 1.0, 1.0, many=False)
    assert poll_in_vain(schedule, 1.0 + STEADY_SECONDS) == Wait(IDLE_FIRST)


def test_rows_that_cannot_be_seen_yet_are_asked_for_again_soon() -> None:
    schedule = a_schedule()
    schedule.begin(STEADY_SECONDS)
    assert isinstance(schedule.next(STEADY_SECONDS), Read)
    schedule.read_skipped()
    assert schedule.next(STEADY_SECONDS) == Wait(UNCOMMITTED_SECONDS)


def test_it_sleeps_once_writers_wake_it_and_reads_once_more_before() -> None:
    schedule = a_schedule(can_sleep=True)
    assert isinstance(poll_in_vain(schedule, SLEEP_AFTER_SECONDS / 2), Wait)
    assert poll_in_vain(schedule, SLEEP_AFTER_SECONDS) == Arm()
    assert schedule.arm_ended(armed=True) == 0.0
    assert poll_in_vain(schedule, SLEEP_AFTER_SECONDS) == Sleep(READ_ASLEEP_SECONDS)


def test_it_does_not_sleep_beside_a_writer_that_would_not_wake_it() -> None:
    schedule = a_schedule(can_sleep=True)
    assert poll_in_vain(schedule, 1.0) == Arm()
    assert schedule.arm_ended(armed=False) > 0.0
    assert poll_in_vain(schedule, 1.0) == Arm()


def test_who_is_woken_refreshes_and_reads_without_waits() -> None:
    """A writer may have wanted to tell of a command."""
    schedule = a_schedule(can_sleep=True)
    schedule.arm_ended(armed=True)
    assert schedule.woken(1.0)
    assert schedule.begin(1.0)
    assert poll_in_vain(schedule, 1.0) == Wait(IDLE_FIRST)


@pytest.mark.parametrize("armed", [False, True])
def test_it_refreshes_after_its_first_attempt_to_arm_alone(armed: bool) -> None:
    """It hears of commands from then on. One that was given since the last refresh would wait until the next one."""
    schedule = a_schedule(can_sleep=True)
    schedule.arm_ended(armed=armed)
    assert schedule.begin(0.1)
    schedule.arm_ended(armed=True)
    assert not schedule.begin(0.1)
    read = schedule.next(0.1)
    assert isinstance(read, Read)
    assert schedule.read_ended(read, 101, 0.1, 0.1, many=False)
    schedule.arm_ended(armed=True)
    assert not schedule.begin(0.2)


def test_rows_end_a_sleep_that_nobody_has_ended() -> None:
    schedule = a_schedule(can_sleep=True)
    schedule.arm_ended(armed=True)
    read = schedule.next(0.0)
    assert isinstance(read, Read)
    assert schedule.read_ended(read, 101, 0.0, 0.0, many=False)
    assert not schedule.woken(0.0)


def test_a_sweep_comes_before_the_read_and_leaves_no_time_to_rest() -> None:
    schedule = a_schedule(state=SequenceState(500_000, frozenset()))
    poll_in_vain(schedule, 0.0)
    schedule.begin(2 * SWEEP_SECONDS)
    first = schedule.next(2 * SWEEP_SECONDS)
    assert first == Read(IdRange(BEGINNING, 500_000), is_sweep=True)
    schedule.read_ended(first, 7, 0.0, 0.0, many=False)
    schedule.begin(2 * SWEEP_SECONDS)
    second = schedule.next(2 * SWEEP_SECONDS)
    assert second == Read(IdRange(7, 500_000), is_sweep=True)
    schedule.read_ended(second, 9, 0.0, 0.0, many=False)
    schedule.begin(2 * SWEEP_SECONDS)
    third = schedule.next(2 * SWEEP_SECONDS)
    assert isinstance(third, Read)
    schedule.read_ended(third, 11, 0.0, 0.0, many=False)
    schedule.begin(2 * SWEEP_SECONDS)
    assert schedule.next(2 * SWEEP_SECONDS) == Read(IdRange(11, 500_000), is_sweep=True)
    assert schedule.next(2 * SWEEP_SECONDS) == Read(IdRange(500_000), is_sweep=False)
    assert schedule.next(2 * SWEEP_SECONDS) == Wait(0.0)


def test_a_sweep_waits_while_many_rows_come() -> None:
    schedule = a_schedule()
    poll_in_vain(schedule, 0.0)
    schedule.begin(0.1)
    read = schedule.next(0.1)
    assert isinstance(read, Read)
    schedule.read_ended(read, 1000, 0.1, 0.1, many=True)
    schedule.begin(2 * SWEEP_SECONDS)
    assert schedule.next(2 * SWEEP_SECONDS) == Read(IdRange(100), is_sweep=False)


def test_rows_that_were_passed_over_are_read_from_the_beginning() -> None:
    schedule = a_schedule()
    poll_in_vain(schedule, 0.0)
    schedule.read_from_beginning()
    schedule.begin(0.1)
    assert schedule.next(0.1) == EVERYTHING


def test_a_long_read_that_found_nothing_is_not_repeated_until_a_transaction_ends() -> None:
    request, other = ReadRequest(10), ReadRequest(11)
    reads = RepeatedEmptyReads()
    assert not reads.may_skip(request)
    reads.read(request, 0, 2 * LONG_POLL_SECONDS)
    assert not reads.may_skip(other)
    assert reads.may_skip(request)
    assert not reads.is_unchanged("one")
    assert reads.may_skip(request)
    assert reads.is_unchanged("one")
    assert not reads.is_unchanged("two")


def test_reads_that_were_short_or_found_rows_are_repeated() -> None:
    request = ReadRequest(10)
    reads = RepeatedEmptyReads()
    for rows, seconds in ((0, LONG_POLL_SECONDS / 2), (1, 2 * LONG_POLL_SECONDS)):
        reads.read(request, 0, 2 * LONG_POLL_SECONDS)
        reads.read(request, rows, seconds)
        assert not reads.may_skip(request)
    reads.read(request, 0, 2 * LONG_POLL_SECONDS)
    reads.forget()
    assert not reads.may_skip(request)


def split_at(bound: int) -> PollSchedule:
    """One that has read up to id 40 and reads live rows first."""
    schedule = a_schedule()
    schedule.read_ended(EVERYTHING, 40, 0.0, 0.0, many=True)
    assert schedule.split(bound)
    return schedule


def test_live_rows_are_read_before_the_backlog() -> None:
    schedule = split_at(70)
    schedule.begin(0.1)
    live = Read(IdRange(70), is_sweep=False, is_live=True)
    assert schedule.next(0.1) == live
    schedule.read_ended(live, None, 0.1, 0.1, many=False)
    assert schedule.next(0.1) == Read(IdRange(40, 70), is_sweep=False)


def test_no_more_of_a_backlog_is_read_while_a_bound_is_looked_for() -> None:
    schedule = a_schedule(state=SequenceState(500_000, frozenset()))
    assert schedule.summary_due(0.0) is None
    schedule.read_ended(EVERYTHING, 40, 0.0, 0.0, many=True)
    assert not schedule.begin(CONTROL_SEARCH_SECONDS / 2)
    assert schedule.next(CONTROL_SEARCH_SECONDS / 2) == Wait(LIVE_POLL_SECONDS)
    assert schedule.begin(CONTROL_SEARCH_SECONDS)
    schedule.begin(PAUSE_SECONDS)
    assert schedule.next(PAUSE_SECONDS) == Read(IdRange(40), is_sweep=False)


@pytest.mark.parametrize(("ids", "often"), [(BULK_IDS, False), (BULK_IDS + 1, True)])
def test_a_large_transaction_that_is_being_written_is_followed_closely(ids: int, often: bool) -> None:
    schedule = a_schedule(state=SequenceState(100, frozenset({"batch"})))
    schedule.refreshed(SequenceState(100 + ids, frozenset({"batch"})), paused=False)
    assert schedule.begin(CONTROL_SEARCH_SECONDS) is often


def test_only_what_is_wanted_is_read() -> None:
    schedule = split_at(70)
    schedule.begin(0.1, live=False)
    assert schedule.next(0.1) == Read(IdRange(40, 70), is_sweep=False)
    schedule.begin(0.1, others=False)
    assert schedule.next(0.1) == Read(IdRange(70), is_sweep=False, is_live=True)
    assert schedule.next(0.1) == Wait(LIVE_POLL_SECONDS)


def test_rows_go_in_line_again_once_the_backlog_has_been_read() -> None:
    schedule = split_at(70)
    assert read_backlog(schedule, 70)
    assert not read_backlog(schedule, None)
    schedule.begin(0.3)
    assert schedule.next(0.3) == Read(IdRange(70), is_sweep=False)


def read_backlog(schedule: PollSchedule, last_id: int | None) -> bool:
    """A read of the backlog that returns rows up to `last_id`, or none. Returns whether the reads are still split."""
    schedule.begin(0.1, live=False)
    action = schedule.next(0.1)
    assert isinstance(action, Read)
    schedule.read_ended(action, last_id, 0.1, 0.1, many=last_id is not None)
    return schedule.is_split


def test_it_is_too_late_to_split_once_rows_above_the_bound_were_read() -> None:
    schedule = a_schedule()
    schedule.read_ended(EVERYTHING, 40, 0.0, 0.0, many=True)
    assert not schedule.split(39)
    assert not schedule.is_split
