"""The poller: it performs what the schedule decides, and reports back what came of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outbox_plugin.core.id_watermark import BEGINNING, SWEEP_SECONDS, IdRange, SequenceState
from outbox_plugin.core.intervals import (
    CONTROL_BUSY_SECONDS,
    CONTROL_IDLE_SECONDS,
    IDLE_FIRST,
    IDLE_LAST,
    LONG_POLL_SECONDS,
    MANY_ROWS,
    READ_ASLEEP_SECONDS,
    SLEEP_AFTER_SECONDS,
    STEADY_SECONDS,
    UNCOMMITTED_SECONDS,
)
from outbox_plugin.core.poll_schedule import Read
from outbox_plugin.core.postgres_ports import Control, ReadRequest
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.relay.events import HarvestEvent, RowsRead
from outbox_plugin.relay.poller import Poller, Source
from outbox_plugin.relay.task_group import TaskGroup
from tests.clock import Clock


class Waits(TaskGroup):
    """A task group that does not wait, and remembers for how long it should have."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, "test")
        self.waits: list[float] = []

    def rest(self, seconds: float) -> None:
        self.waits.append(seconds)


class Outbox:
    """A delivery and its database, in memory."""

    def __init__(self, clock: Clock) -> None:
        self.rows: list[OutboxRow] = []
        self.limit = 2 * MANY_ROWS
        self.paused = False
        self.unparked = False  # What the next answer of the database says about parked keys.
        self.released = False
        self.transactions_ended = 0
        self.read_seconds = 0.0
        self.reads: list[IdRange] = []
        self.refreshes = 0
        self._clock = clock

    def source(self) -> Source:
        return Source(self._control, self._rows_are_released, self._request, self._read, self._snapshot)

    def insert(self, *ids: int) -> None:
        self.rows += [OutboxRow(id_, 0, "t", "k", "v", [], [], 0) for id_ in ids]

    def _control(self) -> tuple[Control, bool]:
        self.refreshes += 1
        return Control(self.paused, frozenset(), SequenceState(10_000, frozenset())), self.unparked

    def _rows_are_released(self, _: float) -> bool:
        return self.released

    def _request(self, read: Read) -> ReadRequest:
        return ReadRequest(self.limit, read.ids)

    def _read(self, request: ReadRequest) -> Sequence[OutboxRow]:
        self._clock.time += self.read_seconds
        self.reads.append(request.ids)
        found, self.rows = self.rows[: request.limit], self.rows[request.limit :]
        return found

    def _snapshot(self) -> str:
        return str(self.transactions_ended)


class Bell:
    """`WakeUp` that records what is done with it."""

    def __init__(self, *, arms: bool = True, rings: bool = False) -> None:
        self.arms, self.rings = arms, rings
        self.calls: list[str] = []

    def arm(self) -> bool:
        self.calls.append("arm")
        return self.arms

    def wait(self, seconds: float) -> bool:
        self.calls.append(f"wait {seconds}")
        return self.rings

    def interrupt(self) -> None:
        self.calls.append("interrupt")

    def disarm(self) -> None:
        self.calls.append("disarm")

    def close(self) -> None:
        """Nothing is open."""


class Bench:
    """A poller, and all that it touches."""

    def __init__(self, bell: Bell | None = None) -> None:
        self.clock = Clock()
        self.outbox = Outbox(self.clock)
        self.tasks = Waits(self.clock)
        self.events: list[HarvestEvent] = []
        self.poller = Poller(3, self.outbox.source(), self.tasks, bell, self.events.append)

    def asleep(self) -> Bench:
        """Poll in vain until the wake-up is armed and the poller waits for it."""
        self.clock.time = SLEEP_AFTER_SECONDS
        for _ in range(2):
            assert not self.poller.poll()
        return self


def test_rows_end_a_poll_without_a_wait_and_are_observed() -> None:
    bench = Bench()
    bench.outbox.insert(1, 2)
    assert [row.id for row in bench.poller.poll()] == [1, 2]
    assert bench.tasks.waits == []
    assert bench.events == [RowsRead(3, 2, 0.0)]


def test_a_poll_that_finds_nothing_waits() -> None:
    bench = Bench()
    assert not bench.poller.poll()
    assert bench.tasks.waits == [IDLE_FIRST]


@pytest.mark.parametrize(
    ("rows", "limit", "found_many"),
    [(MANY_ROWS, 5_000, True), (MANY_ROWS - 1, 5_000, False), (8, 8, True), (7, 8, False), (0, 8, False)],
)
def test_the_next_poll_is_worth_an_early_start_after_many_rows_or_a_full_batch(
    rows: int, limit: int, found_many: bool
) -> None:
    bench = Bench()
    bench.outbox.limit = limit
    bench.outbox.insert(*range(1, rows + 1))
    bench.poller.poll()
    assert bench.poller.found_many is found_many
    bench.poller.poll()
    assert not bench.poller.found_many


def test_it_refreshes_first_of_all_then_when_that_is_due_or_asked_for() -> None:
    bench = Bench()
    for seconds, refresh, refreshes in (
        (0.0, False, 1),
        (CONTROL_BUSY_SECONDS / 2, False, 1),
        (CONTROL_BUSY_SECONDS / 2, True, 2),
        (CONTROL_BUSY_SECONDS, False, 3),
    ):
        bench.clock.time = seconds
        bench.poller.poll(refresh=refresh)
        assert bench.outbox.refreshes == refreshes


def test_a_paused_outbox_is_not_read() -> None:
    bench = Bench()
    bench.outbox.paused = True
    bench.outbox.insert(1)
    assert not bench.poller.poll()
    assert bench.outbox.reads == []
    assert bench.tasks.waits == [IDLE_LAST]


@pytest.mark.parametrize("why", ["unparked", "released"])
def test_rows_that_are_released_are_read_from_the_beginning(why: str) -> None:
    bench = Bench()
    bench.outbox.insert(7)
    bench.poller.poll()
    bench.poller.poll()
    assert bench.outbox.reads == [IdRange(BEGINNING), IdRange(7)]
    setattr(bench.outbox, why, True)
    bench.poller.poll(refresh=True)
    assert bench.outbox.reads[2:] == [IdRange(BEGINNING)]


def test_a_long_read_in_vain_is_not_repeated_before_a_transaction_ends() -> None:
    bench = Bench()
    bench.outbox.read_seconds = 2 * LONG_POLL_SECONDS
    for _ in range(4):  # From the beginning, from the id watermark on, and once more for the first snapshot.
        bench.poller.poll()
    reads = len(bench.outbox.reads)
    bench.poller.poll()
    assert len(bench.outbox.reads) == reads
    bench.outbox.transactions_ended += 1
    bench.poller.poll()
    assert len(bench.outbox.reads) == reads + 1


def test_a_long_read_in_vain_is_repeated_once_rows_are_released() -> None:
    bench = Bench()
    bench.outbox.read_seconds = 2 * LONG_POLL_SECONDS
    bench.outbox.released = True  # Every poll is one from the beginning.
    for _ in range(5):
        bench.poller.poll()
    assert bench.outbox.reads == [IdRange(BEGINNING)] * 5


def test_after_a_while_without_rows_it_lets_writers_wake_it_and_reads_once_more_before_it_sleeps() -> None:
    bell = Bell()
    bench = Bench(bell)
    bench.clock.time = SLEEP_AFTER_SECONDS
    assert not bench.poller.poll()
    assert (bell.calls, len(bench.outbox.reads)) == (["arm"], 1)
    assert not bench.poller.poll()
    assert (bell.calls, len(bench.outbox.reads)) == (["arm", f"wait {READ_ASLEEP_SECONDS}"], 2)
    assert bench.tasks.waits == []


def test_it_waits_and_does_not_sleep_beside_a_writer_that_would_not_wake_it() -> None:
    bell = Bell(arms=False)
    bench = Bench(bell).asleep()
    assert bell.calls == ["arm", "arm"]
    assert bench.tasks.waits == [IDLE_FIRST, 2 * IDLE_FIRST]


def test_being_woken_disarms_the_wake_up_and_refreshes_at_once() -> None:
    bell = Bell(rings=True)
    bench = Bench(bell).asleep()
    assert bell.calls[-1] == "disarm"
    assert bench.outbox.refreshes == 2
    bench.poller.poll()
    assert bench.outbox.refreshes == 3


def test_a_sleep_that_nobody_ended_leaves_the_wake_up_armed_until_rows_come() -> None:
    bell = Bell()
    bench = Bench(bell).asleep()
    assert "disarm" not in bell.calls
    bench.outbox.insert(1)
    assert bench.poller.poll()
    assert bell.calls[-1] == "disarm"


def test_an_interrupt_ends_a_sleep() -> None:
    bell = Bell()
    Bench(bell).poller.interrupt()
    assert bell.calls == ["interrupt"]
    Bench().poller.interrupt()  # Without a trigger there is nothing to end.


def test_it_does_not_start_early_after_a_pause() -> None:
    bench = Bench()
    bench.outbox.insert(*range(1, 2 * MANY_ROWS))
    bench.poller.poll()
    bench.outbox.paused = True
    bench.poller.poll(refresh=True)
    assert not bench.poller.found_many


def test_rows_make_the_next_waits_short_also_when_no_more_come() -> None:
    bench = Bench()
    bench.clock.time = 1.0
    for _ in range(5):
        bench.poller.poll()
    bench.outbox.insert(1)
    bench.poller.poll()
    bench.tasks.waits.clear()
    bench.clock.time += 2 * STEADY_SECONDS
    bench.poller.poll()
    bench.poller.poll()
    assert bench.tasks.waits == [IDLE_FIRST, 2 * IDLE_FIRST]


def test_while_rows_come_steadily_the_waits_do_not_grow() -> None:
    bench = Bench()
    bench.clock.time = 1.0
    bench.outbox.insert(1)
    for _ in range(4):
        bench.poller.poll()
    assert bench.tasks.waits == [IDLE_FIRST] * 3


def test_after_rows_that_could_not_be_seen_the_waits_grow_as_usual() -> None:
    bench = Bench()
    bench.outbox.read_seconds = 2 * LONG_POLL_SECONDS
    for _ in range(10):
        bench.poller.poll()
    assert bench.tasks.waits[-1] == UNCOMMITTED_SECONDS
    bench.outbox.transactions_ended += 1
    bench.outbox.read_seconds = 0.0
    bench.poller.poll()
    assert bench.tasks.waits[-1] != UNCOMMITTED_SECONDS


def test_an_idle_leader_refreshes_seldom() -> None:
    bench = Bench()
    bench.clock.time = 2 * CONTROL_IDLE_SECONDS
    bench.poller.poll()
    for seconds, refreshes in ((2 * CONTROL_BUSY_SECONDS, 1), (CONTROL_IDLE_SECONDS, 2)):
        bench.clock.time = 2 * CONTROL_IDLE_SECONDS + seconds
        bench.poller.poll()
        assert bench.outbox.refreshes == refreshes


@pytest.mark.parametrize("in_vain_since", [False, True])
def test_a_sweep_waits_only_while_many_rows_come(in_vain_since: bool) -> None:
    bench = Bench()
    bench.poller.poll()  # The first read, from the beginning, walks what a sweep would.
    bench.outbox.insert(*range(20_000, 20_000 + MANY_ROWS))
    bench.poller.poll()
    if in_vain_since:
        bench.poller.poll()
    bench.outbox.reads.clear()
    bench.clock.time = 2 * SWEEP_SECONDS
    bench.poller.poll()
    assert (bench.outbox.reads[0] == IdRange(BEGINNING, 10_000)) is in_vain_since
