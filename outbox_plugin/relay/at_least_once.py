"""One term of at-least-once delivery: mark, send past the barrier, purge or reset; three stages overlapped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from outbox_plugin.core.backoff import Backoff
from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.delivery_options import BadRows
from outbox_plugin.core.held_keys import HeldKeys
from outbox_plugin.core.intervals import (
    ERROR_FIRST,
    ERROR_LAST,
    PURGE_REST_SECONDS,
    PURGE_ROWS,
)
from outbox_plugin.core.kafka_ports import AcknowledgingLog
from outbox_plugin.core.marking import ROWS_PER_MARK, resolve_round, rounds
from outbox_plugin.core.parked_keys import ParkedKeys
from outbox_plugin.core.poll_schedule import Read
from outbox_plugin.core.postgres_ports import Control, MarkedStore, ReadRequest, WakeUp
from outbox_plugin.core.row import OutboxRow, Rows, column, fields_of
from outbox_plugin.errors import StoreUnavailable
from outbox_plugin.relay.bad_row_handler import BadRowHandler
from outbox_plugin.relay.events import (
    Observer,
    TermBegan,
    WindowPublished,
    WindowPurged,
)
from outbox_plugin.relay.poller import Poller, Source
from outbox_plugin.relay.runtime import Runtime
from outbox_plugin.relay.task_group import TaskGroup
from outbox_plugin.relay.timed_calls import AnswerWait, earliest, took

MARKS_AHEAD = 1
# No batch is sent while there are so many. The last batch before that may exceed them.
UNPURGED_ROWS = 2 * ROWS_PER_MARK
MARKS_OF_VANISHED_ROWS = 20  # So many marks in a row may return nothing though there are rows.
CONFIRM_SECONDS = 0.5  # A follower waits for twice as long before it takes over.


class AtLeastOnce:
    """Relays one shard for one term.

    One stage marks, the other sends; a third purges what was delivered. What is marked and not delivered when the term
    ends keeps its mark: the next leader marks it again under an id of its own.

    A leader may have been replaced without knowing it. The database does not let it mark rows any more. What it has
    marked before, it sends only while it was seen to lead less than `CONFIRM_SECONDS` ago.

    Args:
        shard: its number.
        leader_id: of this term.
        store: marks and deletes the shard's rows.
        log: sends records, and knows which were acknowledged.
        runtime: time and threads.
        observe: is told of what happens.
        wake_up: lets writers wake us; None if the trigger is not installed.
        bad_rows: what becomes of a row that Kafka refuses.
    """

    def __init__(
        self,
        shard: int,
        leader_id: str,
        store: MarkedStore,
        log: AcknowledgingLog,
        runtime: Runtime,
        observe: Observer,
        *,
        wake_up: WakeUp | None = None,
        bad_rows: BadRows = "park",
    ) -> None:
        self._shard = shard
        self._leader_id = leader_id
        self._mark_id = leader_id  # Renewed after each failed delivery, to force a re-mark.
        self._marking_id = leader_id  # The one that the marking stage has seen.
        self._store = store
        self._log = log
        self._answer_wait = AnswerWait(runtime)
        self._store_wait = AnswerWait(runtime)  # Of the takeover and of the purges.
        self._sender_store_wait = AnswerWait(runtime)
        self._runtime = runtime
        self._observe = observe
        self._dead_letters = bad_rows == "dead-letter"
        self._tasks = TaskGroup(runtime, f"outbox-{shard}")
        self._lock = self._tasks.lock
        self._may_mark = self._tasks.condition()
        self._may_send = self._tasks.condition()
        self._may_purge = self._tasks.condition()
        source = Source(self._control, self._rows_are_released, self._request, self._mark_rows, store.snapshot)
        self._poller = Poller(shard, source, self._tasks, wake_up, observe)
        self._marked: deque[tuple[str, Sequence[OutboxRow], float]] = deque()
        self._delivered: list[int] = []  # To be purged; all carry the same mark.
        self._sender_done = False
        self._parked = ParkedKeys()
        self._held = HeldKeys()
        self._bad_row_handler = BadRowHandler(
            shard,
            store,
            self._sender_store_wait,
            runtime,
            observe,
            self._lock,
            self._note_parked,
            self._held.hold,
        )
        self._failures = Backoff(ERROR_FIRST, ERROR_LAST)
        self._confirmed_at = runtime.now()  # When the database last let us lead.
        self._challenged: Callable[[], None] | None = None

    def take_over(self) -> None:
        """Nothing is to be recovered: rows that the last leader marked carry another id, and are marked again."""
        self._confirmed_at = self._runtime.now()
        with self._store_wait:
            self._store.lead(self._leader_id)
        self._observe(TermBegan(self._shard, self._leader_id, 0))

    def run(self) -> None:
        """Relay until `stop`; returns when every delivered row has been purged.

        Raises:
            TermEnded, ServerUnavailable: what ended the term.
        """
        self._tasks.run(self._send_marked, mark=self._mark, purge=self._purge)

    def stop(self) -> None:
        """Ask `run` to end: what is marked but not sent is left for the next leader."""
        self._tasks.stop()
        self._poller.interrupt()

    @property
    def waiting_since(self) -> float | None:
        """Since when the log has been sending one round; None while it sends none."""
        return self._answer_wait.since

    @property
    def waiting_for_postgres_since(self) -> float | None:
        """Since when it has waited for Postgres; None while it does not."""
        return earliest(self._poller.answer_wait, self._store_wait, self._sender_store_wait)

    def prove(self, proved: Callable[[], None]) -> None:
        """Ask the database soon whether we still lead; `proved` is called if so."""
        with self._lock:
            self._challenged = proved

    def _mark(self) -> None:
        while self._wait_for_room():
            began = self._runtime.now()
            if rows := self._poller.poll(refresh=self._challenged is not None):
                with self._lock:
                    self._marked.append((self._marking_id, rows, began))
                    self._may_send.notify_all()

    def _request(self, read: Read) -> ReadRequest:
        with self._lock:
            return ReadRequest(ROWS_PER_MARK, read.ids, excluded_keys=self._parked.keys | self._held.keys)

    def _mark_rows(self, request: ReadRequest) -> Sequence[OutboxRow]:
        """Mark the earliest rows of the request; none if there are none.

        An earlier leader may delete what it has delivered just when a mark has found these rows. The mark then returns
        none, though other rows follow, which later rows must not overtake.
        """
        for _ in range(MARKS_OF_VANISHED_ROWS):
            asked_at = self._runtime.now()
            if rows := self._store.mark(self._marking_id, request):
                self._confirmed_at = asked_at
                return rows
            if not self._store.has_unmarked(self._marking_id, request):
                return ()
        raise StoreUnavailable(
            "Postgres: rows are found, and none of them can be marked; does a trigger of the table prevent updates?"
        )

    def _wait_for_room(self) -> bool:
        """Waits until rows may be marked; False when the term is to end."""
        with self._lock:
            self._may_mark.wait_for(lambda: self._tasks.stopping or len(self._marked) < MARKS_AHEAD)
            return not self._tasks.stopping

    def _control(self) -> tuple[Control, bool]:
        with self._lock:
            challenged, self._challenged = self._challenged, None
            parkings = self._parked.parkings
        control = self._store.control()
        if challenged is not None:
            challenged()
        with self._lock:
            return control, self._parked.update(control.parked, parkings)

    def _rows_are_released(self, now: float) -> bool:
        """Whether rows can be marked that could not before: held keys go on, or all rows are to be marked again."""
        with self._lock:
            released = self._held.release(now)
            renewed, self._marking_id = self._mark_id != self._marking_id, self._mark_id
        return released or renewed

    def _send_marked(self) -> None:
        try:
            while (work := self._to_send()) is not None:
                mark_id, rows, marked_at = work
                if mark_id == self._mark_id:
                    began = self._runtime.now()
                    sent = self._send(mark_id, rows)
                    ended = self._runtime.now()
                    self._observe(WindowPublished(self._shard, len(sent), ended - marked_at, ended - began, sent))
        finally:
            with self._lock:
                self._sender_done = True
                self._may_purge.notify_all()

    def _to_send(self) -> tuple[str, Sequence[OutboxRow], float] | None:
        """Waits for marked rows, and for purges to keep up; None when the term is to end."""
        with self._lock:
            self._may_send.wait_for(
                lambda: self._tasks.stopping or (self._marked and len(self._delivered) < UNPURGED_ROWS)
            )
            if self._tasks.stopping:
                return None
            work = self._marked.popleft()
            self._may_mark.notify_all()
            return work

    def _send(self, mark_id: str, rows: Sequence[OutboxRow]) -> Sequence[OutboxRow]:
        """Send the rows, round by round; a key's next record goes when its last one is delivered.

        Returns those that were delivered.
        """
        delivered: list[tuple[Any, ...]] = []
        pending = deque(rounds(rows))
        while pending and not self._tasks.stopping:
            round_ = pending.popleft()
            with self._answer_wait:
                sent = self._log.send(round_, self._confirm)
            self._queue_purge([id_ for id_ in column(round_, "id") if id_ in sent.delivered])
            if len(sent.delivered) == len(round_):
                delivered += fields_of(round_)
                continue
            delivered += [fields for fields in fields_of(round_) if fields[0] in sent.delivered]
            refused, done = sent.refused, sent.delivered
            if self._dead_letters and refused:
                refused = self._bad_row_handler.dead_letter(
                    [BadRow(row, refused[row.id]) for row in round_ if row.id in refused]
                )
                done = done | (sent.refused.keys() - refused.keys())
            result = resolve_round(round_, done, refused, sorted(row for each in pending for row in each))
            self._bad_row_handler.park(result.bad)
            self._bad_row_handler.hold(sent.away)
            if result.reset:
                failed = any(
                    row.id not in done and row.id not in refused and row.topic not in sent.away for row in round_
                )
                self._force_remark(mark_id, result.reset)
                self._tasks.rest(self._failures.wait() if failed else 0.0)
                break
        return Rows(delivered)

    def _confirm(self) -> None:
        """Check that we still lead, unless that was checked a moment ago."""
        now = self._runtime.now()
        if now - self._confirmed_at > CONFIRM_SECONDS:
            with self._answer_wait.interrupted_by(self._sender_store_wait):
                self._store.check_leads()
            self._confirmed_at = now

    def _queue_purge(self, ids: list[int]) -> None:
        with self._lock:
            self._delivered += ids
            if len(self._delivered) == len(ids) or self._purge_is_due():
                self._may_purge.notify_all()

    def _note_parked(self, bad: Sequence[BadRow]) -> None:
        self._parked.park(row.ordering_key for row in bad)

    def _force_remark(self, mark_id: str, ids: Sequence[int]) -> None:
        """Let everything that is not delivered be marked again, from the earliest row on."""
        with self._lock:
            self._may_send.wait_for(lambda: self._tasks.stopping or not self._delivered)
            if self._tasks.stopping:
                return  # The next leader marks them, under an id of its own.
            ahead = [id_ for _, rows, _ in self._marked for id_ in column(rows, "id")]
        with self._sender_store_wait:
            self._store.reset(mark_id, [*ids, *ahead])
        with self._lock:  # Rows marked meanwhile under the old id are not sent, but marked again.
            self._mark_id = self._runtime.new_id()
            self._marked.clear()
            self._may_mark.notify_all()

    def _purge(self) -> None:
        while (work := self._to_purge()) is not None:
            mark_id, ids = work
            with self._store_wait:
                seconds = took(self._runtime, partial(self._store.delete, mark_id, ids))
            with self._lock:
                del self._delivered[: len(ids)]
                self._may_send.notify_all()
            self._failures.succeeded()
            self._observe(WindowPurged(self._shard, len(ids), seconds))

    def _to_purge(self) -> tuple[str, list[int]] | None:
        """Waits for delivered rows, and a little for more; None when the sender has ended and all have been purged."""
        with self._lock:
            self._may_purge.wait_for(lambda: self._delivered or self._sender_done)
            self._may_purge.wait_for(self._purge_is_due, PURGE_REST_SECONDS)
            return (self._mark_id, list(self._delivered)) if self._delivered else None

    def _purge_is_due(self) -> bool:
        return self._sender_done or self._tasks.stopping or len(self._delivered) >= PURGE_ROWS
