"""A term of at-least-once delivery on a store and a log in memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from outbox_plugin.adapters.kafka_acknowledging_log import KafkaAcknowledgingLog
from outbox_plugin.adapters.writable_topics import UnwritableTopics
from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.id_watermark import SequenceState
from outbox_plugin.core.kafka_ports import SendResult
from outbox_plugin.core.ordering_key import OrderingKey, OrderingKeys
from outbox_plugin.core.postgres_ports import Control, ReadRequest
from outbox_plugin.core.progress import OutboxIdentity
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import Fenced, Refusal, StoreUnavailable
from outbox_plugin.relay.at_least_once import MARKS_OF_VANISHED_ROWS, AtLeastOnce
from outbox_plugin.relay.events import HarvestEvent, RowsParked, RowsRead
from outbox_plugin.relay.runtime import Threads
from outbox_plugin.settings import Settings
from tests.support import eventually

BAD = 3_000


class Store:
    """`MarkedStore` on a dictionary; every row is bad."""

    def __init__(self) -> None:
        self.identity = OutboxIdentity("incarnation", "here")
        self.rows = dict.fromkeys(range(BAD))
        self._marks: dict[int, str] = {}
        self._lock = threading.Lock()

    def control(self) -> Control:
        return Control(paused=False, parked=frozenset(), sequence=SequenceState(0, frozenset()))

    def snapshot(self) -> str:
        return ""

    def lead(self, leader_id: str) -> None:
        """Nobody else does."""

    def check_leads(self) -> None:
        """It does."""

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        raise AssertionError(bad)

    def dead_letter(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        with self._lock:
            for each in bad:
                del self.rows[each.row.id]
        return ()

    def mark(self, mark_id: str, wanted: ReadRequest) -> Sequence[OutboxRow]:
        with self._lock:
            ids = [id_ for id_ in self.rows if self._marks.get(id_) != mark_id][:100]
            self._marks |= dict.fromkeys(ids, mark_id)
        return [OutboxRow(id_, 0, "t", str(id_), "v", [], [], 0) for id_ in ids]

    def has_unmarked(self, mark_id: str, wanted: ReadRequest) -> bool:
        with self._lock:
            return any(self._marks.get(id_) != mark_id for id_ in self.rows)

    def delete(self, mark_id: str, ids: Sequence[int]) -> int:
        return len(ids)

    def reset(self, mark_id: str, ids: Sequence[int]) -> None:
        """They are marked anew anyway."""

    def close(self) -> None:
        """Nothing is open."""


class RefusingLog:
    """`AcknowledgingLog` that refuses every row."""

    def send(self, rows: Sequence[OutboxRow], confirm: Callable[[], None]) -> SendResult:
        confirm()
        return SendResult(frozenset(), {row.id: Refusal("bad") for row in rows})

    def close(self) -> None:
        """Nothing is open."""


def run_until_empty(relay: AtLeastOnce, store: Store) -> None:
    """Run a whole term, until the store has no rows."""
    relay.take_over()
    term = threading.Thread(target=relay.run)
    term.start()
    eventually(lambda: not store.rows, 30)
    relay.stop()
    term.join(90)


def test_a_term_does_not_remember_its_dead_letters() -> None:
    store = Store()
    relay = AtLeastOnce(0, "leader", store, RefusingLog(), Threads(), lambda _: None, bad_rows="dead-letter")
    run_until_empty(relay, store)
    kept = {name: len(each) for name, each in vars(relay).items() if isinstance(each, set | dict | list | deque)}
    assert max(kept.values()) <= 100, kept


class AskedMeanwhile(Store):
    """It has one row, which is bad. Its key is parked while a question for the parked keys is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = {1: None}
        self.questions = 0
        self.reported = threading.Event()
        self._asked = threading.Event()
        self._parked: frozenset[OrderingKey] = frozenset()

    def control(self) -> Control:
        parked = self._parked
        self.questions += 1
        if self.questions > 1:
            self._asked.set()
            self.reported.wait(30)
        return Control(paused=False, parked=parked, sequence=SequenceState(0, frozenset()))

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        self._asked.wait(30)
        self._parked = frozenset(row.ordering_key for row in bad)
        return ()

    def mark(self, mark_id: str, wanted: ReadRequest) -> Sequence[OutboxRow]:
        excluded = OrderingKeys(wanted.excluded_keys)
        return excluded.without_rows_of_these(super().mark(mark_id, wanted))


def test_a_key_that_is_parked_while_the_database_is_asked_stays_parked() -> None:
    """Else its bad row is marked, sent, refused and reported once more."""
    store, reports = AskedMeanwhile(), list[RowsParked]()

    def observe(event: HarvestEvent) -> None:
        if isinstance(event, RowsParked):
            reports.append(event)
            store.reported.set()

    relay = AtLeastOnce(0, "leader", store, RefusingLog(), Threads(), observe)
    relay.take_over()
    term = threading.Thread(target=relay.run)
    term.start()
    eventually(lambda: store.questions > 4 or len(reports) > 1, 30)
    relay.stop()
    term.join(90)
    assert len(reports) == 1


def test_who_leads_is_asked_after_topics_have_been_looked_up(
    settings_of_nobody: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look them up may take ten seconds; by then, another may lead."""
    log = KafkaAcknowledgingLog(settings_of_nobody, lambda: True, lambda _: None)
    done: list[str] = []

    def resolve_round(*_: object) -> UnwritableTopics:
        done.append("looked up")
        return UnwritableTopics()

    def confirm() -> None:
        done.append("confirmed")
        raise Fenced("another leads")

    monkeypatch.setattr(log._records, "unwritable_topics", resolve_round)
    monkeypatch.setattr(log._records, "produce", lambda *_: done.append("sent"))
    with pytest.raises(Fenced):
        log.send([OutboxRow(1, 0, "t", "k", "v", [], [], 0)], confirm)
    log.close()
    assert done == ["looked up", "confirmed"]


@pytest.fixture
def settings_of_nobody() -> Settings:
    return Settings(dsn="postgresql://127.0.0.1:1/none", bootstrap_servers="127.0.0.1:1", delivery="at-least-once")


class Vanishing(Store):
    """Somebody deletes the earliest two rows while the first mark, of two rows, waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = dict.fromkeys(range(1, 5))
        self.keeps_all = False  # Whether no row can be marked, as with a trigger that prevents it.

    def mark(self, mark_id: str, wanted: ReadRequest) -> Sequence[OutboxRow]:
        if self.keeps_all:
            return ()
        if 1 in self.rows:
            del self.rows[1], self.rows[2]
            return ()
        return super().mark(mark_id, wanted)


def test_a_mark_whose_rows_have_vanished_is_repeated_before_later_rows_are_marked() -> None:
    store, reads = Vanishing(), list[int]()

    def observe(event: HarvestEvent) -> None:
        if isinstance(event, RowsRead):
            reads.append(event.rows)

    relay = AtLeastOnce(0, "leader", store, RefusingLog(), Threads(), observe, bad_rows="dead-letter")
    run_until_empty(relay, store)
    assert reads[0] == 2


def test_a_term_ends_with_the_reason_where_no_row_can_be_marked() -> None:
    store = Vanishing()
    store.keeps_all = True
    relay = AtLeastOnce(0, "leader", store, RefusingLog(), Threads(), lambda _: None)
    relay.take_over()
    with pytest.raises(StoreUnavailable, match="does a trigger of the table prevent updates"):
        relay.run()


class Idle(Store):
    """It has no rows at first. With the fifth mark, one comes that cannot be marked."""

    def __init__(self) -> None:
        super().__init__()
        self.rows.clear()
        self.marks = 0

    def mark(self, mark_id: str, wanted: ReadRequest) -> Sequence[OutboxRow]:
        self.marks += 1
        if self.marks == 5:
            self.rows[1] = None
        return ()


def test_an_idle_leader_notices_at_once_that_a_row_cannot_be_marked() -> None:
    """Though it has asked for the same rows before, and found none: later rows must not overtake this one."""
    store = Idle()
    relay = AtLeastOnce(0, "leader", store, RefusingLog(), Threads(), lambda _: None)
    relay.take_over()
    with pytest.raises(StoreUnavailable, match="does a trigger of the table prevent updates"):
        relay.run()
    assert store.marks == 4 + MARKS_OF_VANISHED_ROWS
