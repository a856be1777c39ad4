"""One term of at-least-once delivery: mark, send past the barrier, purge or reset; two stages overlapped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from outbox_plugin.core.delivery import BadRows
from outbox_plugin.core.floor import Span
from outbox_plugin.core.held import HeldLanes
from outbox_plugin.core.lanes import BadRow, Lane, without
from outbox_plugin.core.marking import ROWS_PER_MARK, judge, rounds
from outbox_plugin.core.pace import (
    ERROR_FIRST,
    ERROR_LAST,
    PURGE_REST_SECONDS,
    PURGE_ROWS,
    RETRY_ASIDE_SECONDS,
    Backoff,
)
from outbox_plugin.core.ports import AcknowledgingLog, MarkedStore, WakeUp, Wanted
from outbox_plugin.core.row import OutboxRow, Rows, column, fields_of
from outbox_plugin.errors import Away, Refusal
from outbox_plugin.relay.events import (
    LanesHeld,
    Observer,
    RowsBuried,
    RowsParked,
    RowsRead,
    TermBegan,
    WindowPublished,
    WindowPurged,
    held_topics,
)
from outbox_plugin.relay.looks import Looks
from outbox_plugin.relay.rest import Rest
from outbox_plugin.relay.runtime import Runtime
from outbox_plugin.relay.stages import Stages
from outbox_plugin.relay.timed import took

MARKS_AHEAD = 1
UNPURGED_ROWS = 2 * ROWS_PER_MARK
CONFIRM_SECONDS = 0.5  # A follower waits for twice as long before it takes over.


class AtLeastOnce:
    """Relays one shard for one term.

    One stage marks, the other sends; a third purges what was delivered. What is marked and not delivered when the term
    ends keeps its mark: the next leader marks it again under an id of its own.

    A leader may have been replaced without knowing it. The database does not let it mark rows any more. What it has
    marked before, it sends only while it was seen to lead less than `CONFIRM_SECONDS` ago.
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
        self._runtime = runtime
        self._observe = observe
        self._bury = bad_rows == "dead-letter"
        self._stages = Stages(runtime, f"outbox-{shard}")
        self._lock = self._stages.lock
        self._may_mark = self._stages.condition()
        self._may_send = self._stages.condition()
        self._may_purge = self._stages.condition()
        self._rest = Rest(self._stages, wake_up)
        self._looks = Looks(store, runtime, self._wanted, self._mark_wanted)
        self._marked: deque[tuple[str, Sequence[OutboxRow], float]] = deque()
        self._delivered: list[int] = []  # To be purged; all carry the same mark.
        self._sender_done = False
        self._parked: frozenset[Lane] = frozenset()
        self._held = HeldLanes()
        self._failures = Backoff(ERROR_FIRST, ERROR_LAST)
        self._confirmed_at = runtime.now()  # When the database last let us lead.
        self._challenged: Callable[[], None] | None = None

    def take_over(self) -> None:
        """Nothing is to be recovered: rows that the last leader marked carry another id, and are marked again."""
        self._confirmed_at = self._runtime.now()
        self._store.lead(self._leader_id)
        self._observe(TermBegan(self._shard, self._leader_id, 0))

    def run(self) -> None:
        """Relay until `stop`; returns when every delivered row has been purged.

        Raises:
            TermEnded, ServerUnavailable: what ended the term.
        """
        self._stages.run(self._send_marked, mark=self._mark, purge=self._purge)

    def stop(self) -> None:
        """Ask `run` to end: what is marked but not sent is left for the next leader."""
        self._stages.stop()
        self._rest.interrupt()

    def prove(self, proved: Callable[[], None]) -> None:
        """Ask the database soon whether we still lead; `proved` is called if so."""
        with self._lock:
            self._challenged = proved

    def _mark(self) -> None:
        paused = False
        while self._wait_for_room():
            now = self._runtime.now()
            if self._rest.control_is_due(now) or self._challenged is not None:
                paused = self._obey()
            self._release_held(now)
            rows = () if paused else self._mark_earliest()
            if rows:
                self._rest.rows_came(now)
                with self._lock:
                    self._marked.append((self._marking_id, rows, now))
                    self._may_send.notify_all()
            elif paused or not self._looks.sweeping:
                self._rest.take(now, paused=paused, hidden=self._looks.hidden)

    def _mark_earliest(self) -> Sequence[OutboxRow]:
        with self._lock:
            mark_id = self._mark_id
        if mark_id != self._marking_id:
            self._marking_id = mark_id
            self._looks.start_again()
        return self._looks.look()

    def _wanted(self, span: Span) -> Wanted:
        with self._lock:
            return Wanted(ROWS_PER_MARK, span, parked=self._parked | self._held.lanes)

    def _mark_wanted(self, wanted: Wanted) -> Sequence[OutboxRow]:
        asked_at = self._runtime.now()
        rows = self._store.mark(self._marking_id, wanted)
        self._observe(RowsRead(self._shard, len(rows), self._runtime.now() - asked_at))
        if rows:
            self._confirmed_at = asked_at
        return rows

    def _wait_for_room(self) -> bool:
        """Waits until rows may be marked; False when the term is to end."""
        with self._lock:
            self._may_mark.wait_for(lambda: self._stages.stopping or len(self._marked) < MARKS_AHEAD)
            return not self._stages.stopping

    def _obey(self) -> bool:
        with self._lock:
            challenged, self._challenged = self._challenged, None
        control = self._store.control()
        if challenged is not None:
            challenged()
        self._looks.learned(control.drawn)
        with self._lock:
            released = self._parked - control.parked
            self._parked = control.parked
        if released:
            self._looks.start_again()
        return control.paused

    def _release_held(self, now: float) -> None:
        with self._lock:
            released = self._held.release(now)
        if released:
            self._looks.start_again()

    def _send_marked(self) -> None:
        try:
            while (work := self._to_send()) is not None:
                mark_id, rows, marked_at = work
                if mark_id == self._mark_id:
                    sent = self._send(mark_id, rows)
                    self._observe(WindowPublished(self._shard, len(sent), self._runtime.now() - marked_at, sent))
        finally:
            with self._lock:
                self._sender_done = True
                self._may_purge.notify_all()

    def _to_send(self) -> tuple[str, Sequence[OutboxRow], float] | None:
        """Waits for marked rows, and for purges to keep up; None when the term is to end."""
        with self._lock:
            self._may_send.wait_for(
                lambda: self._stages.stopping or (self._marked and len(self._delivered) < UNPURGED_ROWS)
            )
            if self._stages.stopping:
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
        while pending and not self._stages.stopping:
            round_ = pending.popleft()
            sent = self._log.send(round_, self._confirm)
            self._to_be_purged([id_ for id_ in column(round_, "id") if id_ in sent.delivered])
            if len(sent.delivered) == len(round_):
                delivered += fields_of(round_)
                continue
            delivered += [fields for fields in fields_of(round_) if fields[0] in sent.delivered]
            refused, done = sent.refused, sent.delivered
            if self._bury and refused:
                refused = self._dead_letter([BadRow(row, refused[row.id]) for row in round_ if row.id in refused])
                done = done | (sent.refused.keys() - refused.keys())
            verdict = judge(round_, done, refused, sorted(row for each in pending for row in each))
            self._park(verdict.bad)
            self._hold(sent.away)
            if verdict.reset:
                failed = any(
                    row.id not in done and row.id not in refused and row.topic not in sent.away for row in round_
                )
                self._force_remark(mark_id, verdict.reset)
                self._stages.rest(self._failures.wait() if failed else 0.0)
                break
        return Rows(delivered)

    def _confirm(self) -> None:
        """See that we still lead, unless that was seen just now."""
        now = self._runtime.now()
        if now - self._confirmed_at > CONFIRM_SECONDS:
            self._store.check_leads()
            self._confirmed_at = now

    def _to_be_purged(self, ids: list[int]) -> None:
        with self._lock:
            self._delivered += ids
            if len(self._delivered) == len(ids) or self._purge_is_due():
                self._may_purge.notify_all()

    def _dead_letter(self, bad: Sequence[BadRow]) -> Mapping[int, Refusal]:
        """Make bad rows dead letters; returns the refusals of those that the database refuses to move."""
        stuck = self._store.bury(bad)
        dead = without(bad, stuck)
        if dead:
            self._observe(RowsBuried(self._shard, tuple(dead)))
        return {each.row.id: each.refusal for each in stuck}

    def _park(self, bad: Sequence[BadRow]) -> None:
        """Let the lanes of bad rows wait. One that the database refuses to park is held back, and tried again."""
        unrecorded = self._store.park(bad) if bad else ()
        parked = without(bad, unrecorded)
        with self._lock:
            self._parked |= {each.lane for each in parked}
            again_at = self._runtime.now() + RETRY_ASIDE_SECONDS
            self._held.hold({each.lane: again_at for each in unrecorded})
        if parked:
            self._observe(RowsParked(self._shard, tuple(parked)))
        for each in unrecorded:
            self._observe(LanesHeld(self._shard, (each.lane,), each.refusal.reason, RETRY_ASIDE_SECONDS))

    def _hold(self, topics: Mapping[str, Away]) -> None:
        """Leave the rows of topics that are away unmarked for a while, so that the rest goes."""
        now = self._runtime.now()
        with self._lock:
            self._held.hold({Lane(topic, None): now + away.seconds for topic, away in topics.items()})
        for event in held_topics(self._shard, topics):
            self._observe(event)

    def _force_remark(self, mark_id: str, ids: Sequence[int]) -> None:
        """Let everything that is not delivered be marked again, from the earliest row on."""
        with self._lock:
            self._may_send.wait_for(lambda: self._stages.stopping or not self._delivered)
            if self._stages.stopping:
                return  # The next leader marks them, under an id of its own.
            ahead = [id_ for _, rows, _ in self._marked for id_ in column(rows, "id")]
        self._store.reset(mark_id, [*ids, *ahead])
        with self._lock:  # What was marked under the old id meanwhile is not sent, and marked anew.
            self._mark_id = self._runtime.new_id()
            self._marked.clear()
            self._may_mark.notify_all()

    def _purge(self) -> None:
        while (work := self._to_purge()) is not None:
            mark_id, ids = work
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
        return self._sender_done or self._stages.stopping or len(self._delivered) >= PURGE_ROWS
