"""One term after another on a store and a log in memory, with a failure at every step there is.

Real servers have the last word (tests/chaos); here each step fails by design, not by luck.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence

import pytest

from outbox_plugin.core import adaptive_read_limit, backlog, rows_beside_live
from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.id_ranges import IdRanges
from outbox_plugin.core.id_watermark import SequenceState
from outbox_plugin.core.intervals import LONG_POLL_SECONDS
from outbox_plugin.core.last_progress import LastProgress
from outbox_plugin.core.postgres_ports import Control, ReadRequest
from outbox_plugin.core.progress import OutboxIdentity, ProgressRecord, Publication
from outbox_plugin.core.recovery import TermHistory
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.errors import Fenced, ForeignOutbox, LogUnavailable, OutcomeUnknown, StoreUnavailable
from outbox_plugin.relay import exactly_once
from outbox_plugin.relay.events import (
    HarvestEvent,
    KeysSummarised,
    LiveRowsJoined,
    RowsRead,
    TermBegan,
    TransactionEnded,
    WindowPublished,
    WindowPurged,
)
from outbox_plugin.relay.exactly_once import ExactlyOnce
from outbox_plugin.relay.runtime import Threads
from tests.support import eventually

NOW = 820_000_000_000_000
OURS = OutboxIdentity("incarnation", "here")
ROWS = 10


class Kafka:
    """What the brokers hold: committed rows, the last committed progress record, and who may still commit."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.progress: ProgressRecord | None = None
        self.epoch = 0


class Faults:
    """Raises at the step that is chosen; counts the steps."""

    def __init__(self, at: int | None) -> None:
        self._at = at
        self._lock = threading.Lock()
        self.steps = 0

    def step(self, error: Exception) -> None:
        with self._lock:
            self.steps += 1
            if self.steps == self._at:
                raise error


class Store:
    """`WindowStore` on a dictionary that survives it."""

    def __init__(self, rows: dict[int, OutboxRow], faults: Faults, identity: OutboxIdentity = OURS) -> None:
        self.identity = identity
        self._rows = rows
        self._faults = faults

        self.layout = Layout(1, 1)

    def control(self) -> Control:
        """Nothing is ordered."""
        return Control(paused=False, parked=frozenset(), sequence=SequenceState(0, frozenset()))

    def snapshot(self) -> str:
        return str(sorted(self._rows))

    def key_hashes(self, rows: Sequence[OutboxRow]) -> Sequence[int]:
        raise AssertionError("there is no backlog")

    def end_of_batch(self, up_to: int) -> int | None:
        raise AssertionError("there is no backlog")

    def key_hashes_up_to(self, bound: int, rows: int) -> Generator[bytes]:
        raise AssertionError("there is no backlog")

    def cancel_key_hashes(self) -> None:
        """There is no backlog."""

    def lead(self, leader_id: str) -> None:
        self._faults.step(StoreUnavailable("beginning to lead"))

    def check_leads(self) -> None:
        """Nobody else does."""

    def generation(self, slice_: Slice) -> int:
        return 0

    def raise_generation(self, slice_: Slice, present: int) -> int:
        raise AssertionError("no transaction is stuck")

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        return ()  # No row is bad.

    def dead_letter(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        return ()  # No row is bad.

    def is_settled(self) -> bool:
        return True

    def mark_settled(self) -> None:
        """There was no other layout."""

    def begin_term(self, above: int = 0) -> TermHistory:
        return TermHistory(above + 1)

    def mark_recorded(self, term: int) -> None:
        self._faults.step(StoreUnavailable("remembering the record"))

    def mark_nothing_in_flight(self, term: int) -> None:
        """The next one expects nothing."""

    def read(self, wanted: ReadRequest) -> Sequence[OutboxRow]:
        self._faults.step(StoreUnavailable("reading"))
        return [self._rows[each] for each in sorted(self._rows) if each not in wanted.in_flight][: wanted.limit]

    def purge(self, publications: Sequence[Publication]) -> int:
        self._faults.step(StoreUnavailable("before the purge"))
        gone = [
            each
            for publication in publications
            for each in publication.ids
            if each in self._rows and self._rows[each].horizon <= publication.horizon
        ]
        for each in gone:
            del self._rows[each]
        self._faults.step(StoreUnavailable("after the purge, its answer lost"))
        return len(gone)

    def recover(self, publications: Sequence[Publication]) -> int:
        return self.purge(publications)

    def close(self) -> None:
        """Nothing is open."""


class TransactionalLog:
    """`TransactionalLog` on a `Kafka` that survives it."""

    largest_progress_bytes = 900_000

    def __init__(self, kafka: Kafka, faults: Faults) -> None:
        self._kafka = kafka
        self._faults = faults
        self._epoch = 0
        self.in_doubt = False

    def fence(self, generation: int) -> None:
        self._faults.step(LogUnavailable("fencing"))
        self._kafka.epoch += 1
        self._epoch = self._kafka.epoch

    def read_progress(self, *, fenced: bool, accepts_unsigned: bool = False) -> LastProgress:
        self._faults.step(LogUnavailable("reading progress"))
        return LastProgress(self._kafka.progress, self._kafka.progress)

    def former(self, slice_: Slice) -> TransactionalLog:
        raise AssertionError("there was no other layout")

    def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        self._faults.step(LogUnavailable("aborted"))
        if self._epoch != self._kafka.epoch:
            raise Fenced("another one leads")
        self._kafka.rows.extend(row.id for row in rows)
        self._kafka.progress = progress
        self._faults.step(OutcomeUnknown("committed, the answer lost"))
        return True

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_read_limit, "ROWS_PER_WINDOW", 3)


def table(first: int = 1, horizon: int = 100) -> dict[int, OutboxRow]:
    return {each: OutboxRow(each, NOW, "t", "k", "v", [], [], horizon) for each in range(first, first + ROWS)}


def a_term(rows: dict[int, OutboxRow], kafka: Kafka, faults: Faults, leader_id: str = "leader") -> ExactlyOnce:
    return ExactlyOnce(0, leader_id, Store(rows, faults), TransactionalLog(kafka, faults), Threads(), lambda _: None)


def live(term: ExactlyOnce, until: Callable[[], object]) -> BaseException | None:
    """Run a term until the condition holds, or it ends by itself; returns what ended it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            term.take_over()
            term.run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        eventually(lambda: until() or not thread.is_alive(), 20)
    finally:
        term.stop()
        thread.join()
    return errors[0] if errors else None


def test_every_row_is_published_once_in_order_and_deleted() -> None:
    rows, kafka = table(), Kafka()
    assert live(a_term(rows, kafka, Faults(None)), lambda: not rows) is None
    assert kafka.rows == list(range(1, ROWS + 1))


@pytest.mark.parametrize("at", range(1, 26))
def test_a_term_that_fails_at_any_step_is_made_good_by_the_next(at: int) -> None:
    rows, kafka = table(), Kafka()
    faults = Faults(at)
    ended_by = live(a_term(rows, kafka, faults), lambda: not rows and faults.steps > 25)
    assert ended_by is not None
    assert live(a_term(rows, kafka, Faults(None), "next"), lambda: not rows) is None
    assert kafka.rows == list(range(1, ROWS + 1))
    assert not rows


def test_a_leader_that_hands_over_leaves_a_record_that_names_no_rows() -> None:
    rows, kafka = table(), Kafka()
    assert live(a_term(rows, kafka, Faults(None)), lambda: not rows) is None
    assert kafka.progress is not None
    assert kafka.progress.publications == ()


def test_a_hand_over_whose_record_fails_is_a_hand_over_all_the_same() -> None:
    class Failing(TransactionalLog):
        def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
            if kafka.rows and not rows:
                raise LogUnavailable("no answer")
            return super().publish(rows, progress)

    rows, kafka, faults = table(), Kafka(), Faults(None)
    term = ExactlyOnce(0, "leader", Store(rows, faults), Failing(kafka, faults), Threads(), lambda _: None)
    assert live(term, lambda: not rows) is None
    assert kafka.rows == list(range(1, ROWS + 1))


def test_an_idle_leader_writes_one_record_that_names_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactly_once, "CLEAR_PROGRESS_SECONDS", 1.0)
    rows, kafka, records = table(), Kafka(), list[int]()

    class Counting(TransactionalLog):
        def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
            records.append(len(progress.publications))
            return super().publish(rows, progress)

    faults = Faults(None)
    term = ExactlyOnce(0, "leader", Store(rows, faults), Counting(kafka, faults), Threads(), lambda _: None)
    idle_since: list[float] = []

    def has_been_idle() -> bool:
        if records[-1:] == [0] and len(records) > 1 and not idle_since:
            idle_since.append(time.monotonic())
        return bool(idle_since) and time.monotonic() - idle_since[0] > 3.0

    assert live(term, has_been_idle) is None
    assert records.count(0) == 2  # The first of them when the term began.


def test_rows_that_are_hidden_are_not_passed_over_again_and_again() -> None:
    class Large(Store):
        """Its rows are a transaction's that is still at work."""

        looks, asked, ended = 0, 0, False

        def read(self, wanted: ReadRequest) -> Sequence[OutboxRow]:
            if self.ended:
                return super().read(wanted)
            self.looks += 1
            time.sleep(2 * LONG_POLL_SECONDS)
            return []

        def snapshot(self) -> str:
            self.asked += 1
            return str(self.ended)

    rows, kafka, faults = table(), Kafka(), Faults(None)
    store = Large(rows, faults)

    def is_over() -> bool:
        store.ended = store.ended or store.asked > 20
        return not rows

    term = ExactlyOnce(0, "leader", store, TransactionalLog(kafka, faults), Threads(), lambda _: None)
    assert live(term, is_over) is None
    assert kafka.rows == list(range(1, ROWS + 1))
    assert (
        store.looks == 3
    )  # From the beginning; from the id watermark; and that again, once the snapshot was asked for.


def test_a_zombie_publishes_nothing_once_another_has_fenced_it() -> None:
    rows, kafka = table(), Kafka()
    zombie = a_term(rows, kafka, Faults(None), "zombie")
    zombie.take_over()
    assert live(a_term(rows, kafka, Faults(None), "leader"), lambda: not rows) is None
    rows.update(table(first=100))
    with pytest.raises(Fenced):
        zombie.run()
    assert kafka.rows == list(range(1, ROWS + 1))


def test_a_leader_proves_itself_without_any_row() -> None:
    rows: dict[int, OutboxRow] = {}
    term, proved = a_term(rows, Kafka(), Faults(None)), threading.Event()
    term.prove(proved.set)
    assert live(term, proved.is_set) is None
    assert proved.is_set()


def test_rows_that_took_the_ids_of_published_ones_are_not_deleted() -> None:
    """The table was truncated and filled again between two terms: same ids, later transactions."""
    rows, kafka = table(), Kafka()
    assert isinstance(
        live(a_term(rows, kafka, Faults(6)), lambda: False), StoreUnavailable | LogUnavailable | OutcomeUnknown
    )
    rows.clear()
    rows.update(table(horizon=200))
    before = len(kafka.rows)
    assert live(a_term(rows, kafka, Faults(None), "next"), lambda: not rows) is None
    assert kafka.rows[before:] == list(range(1, ROWS + 1))


def test_another_outboxs_progress_is_refused_before_anything_is_deleted() -> None:
    rows, kafka = table(), Kafka()
    kafka.progress = ProgressRecord(
        OutboxIdentity("other", "elsewhere"), "x", 1, (Publication(IdRanges.of([1]), 1_000, NOW),)
    )
    assert isinstance(live(a_term(rows, kafka, Faults(None)), lambda: False), ForeignOutbox)
    assert len(rows) == ROWS
    assert kafka.rows == []


def test_what_happens_is_told() -> None:
    rows, told = table(), list[HarvestEvent]()
    faults = Faults(None)
    term = ExactlyOnce(7, "leader", Store(rows, faults), TransactionalLog(Kafka(), faults), Threads(), told.append)
    live(term, lambda: not rows)
    assert told[0] == TermBegan(7, "leader", 0, term=1)
    assert sum(len(event.records) for event in told if isinstance(event, WindowPublished)) == ROWS
    assert {event.error_type for event in told if isinstance(event, TransactionEnded)} == {None}
    assert sum(event.rows for event in told if isinstance(event, RowsRead)) == ROWS
    assert sum(event.rows for event in told if isinstance(event, WindowPurged)) == ROWS


def test_a_record_without_rows_that_is_tried_again_names_no_rows_that_are_gone_by_now() -> None:
    rows, kafka, faults, may_purge = table(), Kafka(), Faults(None), threading.Event()
    named: list[int] = []
    purged: list[int] = []

    class Waiting(Store):
        def purge(self, publications: Sequence[Publication]) -> int:
            may_purge.wait(20 if publications else 0)
            return super().purge(publications)

    class Again(TransactionalLog):
        def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
            if not rows:
                named.append(sum(len(each.ids) for each in progress.publications))
                if progress.publications and not may_purge.is_set():
                    may_purge.set()
                    eventually(lambda: sum(purged) == ROWS, 20)
                    return False
            return super().publish(rows, progress)

    def observe(event: HarvestEvent) -> None:
        if isinstance(event, WindowPurged):
            purged.append(event.rows)
        elif isinstance(event, WindowPublished) and len(kafka.rows) == ROWS:
            term.prove(proved.set)

    proved = threading.Event()
    term = ExactlyOnce(0, "leader", Waiting(rows, faults), Again(kafka, faults), Threads(), observe)
    assert live(term, proved.is_set) is None
    assert named[:3] == [0, ROWS, 0]


def test_an_earlier_layout_is_not_settled_before_the_record_that_stops_its_leaders_is_there() -> None:
    settled: list[bool] = []

    class Former(TransactionalLog):
        def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
            return False

    class Latter(TransactionalLog):
        def former(self, slice_: Slice) -> TransactionalLog:
            return Former(Kafka(), faults)

    class Unsettled(Store):
        def mark_settled(self) -> None:
            settled.append(True)

    faults = Faults(None)
    store = Unsettled(table(), faults)
    store.layout = Layout(2, 1, (2,))
    term = ExactlyOnce(0, "leader", store, Latter(Kafka(), faults), Threads(), lambda _: None)
    assert isinstance(live(term, lambda: settled), LogUnavailable)
    assert not settled


class FarClock(Threads):
    """Time goes on a little with each look at it, and by `SECONDS` with each transaction."""

    SECONDS = 0.1

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0.0

    def now(self) -> float:
        return self.go_on(0.001)

    def go_on(self, seconds: float) -> float:
        with self._lock:
            self._now += seconds
            return self._now


class BesideLive(Store):
    """Its rows are a backlog. Each read of live rows finds a new one, whose key the backlog has not."""

    def __init__(self, rows: dict[int, OutboxRow], faults: Faults) -> None:
        super().__init__(rows, faults)
        self.last_of_backlog = self._last = max(rows)

    def control(self) -> Control:
        self._last += 1
        return Control(paused=False, parked=frozenset(), sequence=SequenceState(self._last, frozenset()))

    def end_of_batch(self, up_to: int) -> int | None:
        return self.last_of_backlog

    def key_hashes_up_to(self, bound: int, rows: int) -> Generator[bytes]:
        yield b""

    def key_hashes(self, rows: Sequence[OutboxRow]) -> Sequence[int]:
        return [0] * len(rows)

    def read(self, wanted: ReadRequest) -> Sequence[OutboxRow]:
        if wanted.is_live:
            self._last += 1
            self._rows[self._last] = OutboxRow(self._last, NOW, "t", "live", "v", [], [], 100)
        above, up_to, _ = wanted.ids
        ids = (each for each in sorted(self._rows) if each > above and (up_to is None or each <= up_to))
        return [self._rows[each] for each in ids if each not in wanted.in_flight][: wanted.limit]


def test_a_leader_that_takes_over_beside_a_backlog_measures_how_far_kafka_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take the backlog in small parts to its end, as from a Kafka on the same machine."""
    monkeypatch.setattr(adaptive_read_limit, "ROWS_PER_WINDOW", 40)
    monkeypatch.setattr(backlog, "MIN_BACKLOG_IDS", 100)
    for name, value in (("MIN_ROWS", 2), ("MAX_ROWS", 30), ("_ROWS_PER_SECOND", 300)):
        monkeypatch.setattr(rows_beside_live, name, value)
    rows = {each: OutboxRow(each, NOW, "t", "k", "v", [], [], 100) for each in range(1, 1_001)}
    kafka, faults, clock, events, empty = Kafka(), Faults(None), FarClock(), list[HarvestEvent](), list[int]()
    store = BesideLive(rows, faults)

    class Far(TransactionalLog):
        def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
            clock.go_on(clock.SECONDS)
            if not rows:
                empty.append(len(events))
            return super().publish(rows, progress)

    term = ExactlyOnce(0, "leader", store, Far(kafka, faults), clock, events.append)
    assert live(term, lambda: any(isinstance(event, LiveRowsJoined) for event in events)) is None
    split = next(place for place, event in enumerate(events) if isinstance(event, KeysSummarised))
    windows = [event.records for event in events[split:] if isinstance(event, WindowPublished)]
    sizes = [sum(row.id <= store.last_of_backlog for row in window) for window in windows]
    assert 30 in sizes
    assert len([size for size in sizes if 0 < size < 30]) < 5
    assert len([place for place in empty if place >= split]) <= 3  # Two that measure, and one at the term's end.
