"""One term of exactly-once delivery: read, publish with progress, purge; three stages overlapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial

from outbox_plugin.core.bad_rows import BadRow, first_bad_rows
from outbox_plugin.core.delivery_options import BadRows
from outbox_plugin.core.intervals import CLEAR_PROGRESS_SECONDS, PURGE_REST_SECONDS, PURGE_ROWS
from outbox_plugin.core.kafka_ports import TransactionalLog
from outbox_plugin.core.postgres_ports import WakeUp, WindowStore
from outbox_plugin.core.progress import ProgressRecord, Publication
from outbox_plugin.core.recovery import TermHistory, left_behind, require_recorded
from outbox_plugin.core.repeated_requests import require_own_record
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.rows_beside_live import RowsBesideLive
from outbox_plugin.core.shards import SETTLING_SHARD, Slice
from outbox_plugin.core.window import Window, Windows, rows_in
from outbox_plugin.core.window_queue import QueuedWindow, WindowQueue
from outbox_plugin.errors import (
    LogUnavailable,
    Refusal,
    RowsRefused,
    ServerUnavailable,
    TermEnded,
    TopicsAway,
    TransactionStuck,
)
from outbox_plugin.relay.bad_row_handler import BadRowHandler
from outbox_plugin.relay.events import (
    GenerationRaised,
    Observer,
    RecordsIgnored,
    TermBegan,
    WindowPublished,
    WindowPurged,
)
from outbox_plugin.relay.live_rows import LiveRows
from outbox_plugin.relay.poller import Poller
from outbox_plugin.relay.runtime import Runtime
from outbox_plugin.relay.task_group import TaskGroup
from outbox_plugin.relay.timed_calls import AnswerWait, TimedLog, earliest, took
from outbox_plugin.relay.window_source import WindowSource

Proved = Callable[[], None]


class ExactlyOnce:
    """Relays one shard for one term.

    Each stage has a thread and takes what the one before it has done; all that they share is guarded by one lock.
    The first stage to fail ends the term, and its error is the term's.

    Args:
        shard: its number.
        leader_id: of this term.
        store: reads and deletes the shard's rows.
        log: publishes windows in transactions.
        runtime: time and threads.
        observe: is told of what happens.
        wake_up: lets writers wake us; None if the trigger is not installed.
        bad_rows: what becomes of a row that Kafka refuses.
        adopt: go on where the last progress record is lost or another outbox's.
    """

    def __init__(
        self,
        shard: int,
        leader_id: str,
        store: WindowStore,
        log: TransactionalLog,
        runtime: Runtime,
        observe: Observer,
        *,
        wake_up: WakeUp | None = None,
        bad_rows: BadRows = "park",
        adopt: bool = False,
    ) -> None:
        self._shard = shard
        self._leader_id = leader_id
        self._store = store
        self._log = log
        self._timed_log = TimedLog(shard, log, runtime, observe)
        self._answer_wait = AnswerWait(runtime)
        self._store_wait = AnswerWait(runtime)  # Of the takeover and of the purges.
        self._publisher_store_wait = AnswerWait(runtime)
        self._runtime = runtime
        self._observe = observe
        self._bad_rows = bad_rows
        self._adopt = adopt
        self._windows = Windows()
        self._tasks = TaskGroup(runtime, f"outbox-{shard}")
        self._lock = self._tasks.lock
        self._may_read = self._tasks.condition()
        self._may_publish = self._tasks.condition()
        self._may_purge = self._tasks.condition()
        self._has_purged = self._tasks.condition()
        self._live_rows = LiveRows(shard, store, self._tasks, observe, self._join_queue)
        self._rows_beside_live = RowsBesideLive()
        self._bad_row_handler = BadRowHandler(
            shard,
            store,
            self._publisher_store_wait,
            runtime,
            observe,
            self._lock,
            self._windows.park,
            self._windows.hold,
        )
        source = WindowSource(store, self._windows, self._lock, self._live_rows, self._rows_beside_live).source()
        self._poller = Poller(shard, source, self._tasks, wake_up, observe)
        self._queue = WindowQueue()
        self._published: list[Window] = []
        self._publishing = self._publisher_done = False
        self._challenged: Proved | None = None
        self._slice = Slice(shard, store.layout.shards)
        self._generation = 0  # Of the transactional id; see `core.transactional_id_generations`.
        self._names_rows = False  # Whether the last progress record does.
        self._terms = TermHistory()
        self._outcome_unknown = False  # Of a transaction with rows in it.

    def take_over(self) -> None:
        """Fence, read the progress record, delete the rows that it names, and commit a first record of our own.

        Shard 0 does the same for each shard of an earlier layout whose leader may still be at work. If every shard did,
        they would fence each other's producers of the former slices again and again.

        Raises:
            ForeignOutbox: the group relays another outbox.
            ProgressLost: the progress topic lacks a record that the database expects.
        """
        if self._shard != SETTLING_SHARD and not self._wait_for_settled_layout():
            return
        with self._store_wait:
            self._store.lead(self._leader_id)
        with self._answer_wait:
            self._take_over()

    def _take_over(self) -> None:
        self._generation = self._store.generation(self._slice)
        self._fence(has_fenced=False)
        self._terms = self._store.begin_term()
        recovered = sum(self._recover_former()) if self._shard == SETTLING_SHARD else 0
        rows, self._generation = self._recover(self._log, self._slice, self._generation)
        self._store.check_leads()  # Once more: it may have fenced a later generation.
        if not self._log.publish((), self._progress(0, ())):
            raise LogUnavailable("Kafka does not take the term's first record")
        self._store.mark_recorded(self._terms.number)
        self._observe(TermBegan(self._shard, self._leader_id, recovered + rows, self._terms.number))

    def _wait_for_settled_layout(self) -> bool:
        """Wait until shard 0 has recovered the slices of earlier layouts; False when the term is to end."""
        return not self._store.layout.former or self._tasks.wait_until(self._is_settled)

    def _is_settled(self) -> bool:
        with self._store_wait:
            return self._store.is_settled()

    def _recover(self, log: TransactionalLog, slice_: Slice, generation: int) -> tuple[int, int]:
        """Delete what the fenced slice has published. Returns how many rows, and the generation that is fenced."""
        accepts_unsigned = slice_.name in self._terms.unsigned
        last = log.read_progress(fenced=True, accepts_unsigned=accepts_unsigned)
        while last.record is not None and last.record.generation > generation:
            generation = last.record.generation  # A database that was restored has forgotten it.
            log.fence(generation)
            last = log.read_progress(fenced=True, accepts_unsigned=accepts_unsigned)
        if last.ignored:
            self._observe(RecordsIgnored(self._shard, last.ignored))
        require_recorded(last.record, slice_.name, self._terms, adopt=self._adopt)
        if last.newest is not None and last.newest.term >= self._terms.number:  # A backup and its clock were restored.
            self._terms = self._store.begin_term(last.newest.term)
        return self._store.recover(left_behind(last.record, self._store.identity, adopt=self._adopt)), generation

    def _recover_former(self) -> list[int]:
        with ExitStack() as opened:
            slices = self._store.layout.former
            logs = [
                (opened.enter_context(closing(self._log.former(slice_))), slice_, self._store.generation(slice_))
                for slice_ in slices
            ]
            # Fence all first: slices share partitions, where one's open transaction hides the others' records.
            for log, _, generation in logs:
                log.fence(generation)
            recovered = [self._recover(*each) for each in logs]
            for (log, _, _), (_, generation) in zip(logs, recovered, strict=True):
                # A former leader that replaces its producer then finds another's record, and stops.
                if not log.publish((), replace(self._progress(0, ()), generation=generation)):
                    raise LogUnavailable("Kafka does not take a record for a shard of an earlier layout")
        if recovered:
            self._store.mark_settled()
        return [rows for rows, _ in recovered]

    def run(self) -> None:
        """Relay until `stop`; returns when every published window has been purged.

        Raises:
            TermEnded, ServerUnavailable: what ended the term.
        """
        try:
            self._tasks.run(self._publish_windows, read=self._read_windows, purge=self._purge_windows)
            if self._names_rows and not self._log.in_doubt:
                with suppress(TermEnded, ServerUnavailable):  # Else the next leader searches for rows that are gone.
                    self._commit((), self._progress(0, ()))
        finally:
            if not self._outcome_unknown and not self._windows.unpurged:
                with suppress(TermEnded, ServerUnavailable):  # Else later leaders expect a record, and it is there.
                    self._store.mark_nothing_in_flight(self._terms.number)

    def stop(self) -> None:
        """Ask `run` to end: what has been read but not published is left for the next leader."""
        self._tasks.stop()
        self._poller.interrupt()

    @property
    def waiting_since(self) -> float | None:
        """Since when the takeover, or a transaction, has lasted; None while there is none."""
        return self._answer_wait.since

    @property
    def waiting_for_postgres_since(self) -> float | None:
        """Since when it has waited for Postgres; None while it does not."""
        return earliest(self._poller.answer_wait, self._store_wait, self._publisher_store_wait)

    def prove(self, proved: Proved) -> None:
        """Commit a transaction soon, to see whether we have been fenced; `proved` is called once it is committed."""
        with self._lock:
            self._challenged = proved
            self._may_publish.notify_all()

    def _read_windows(self) -> None:
        try:
            while self._wait_for_room():
                self._read_window()
        finally:
            self._live_rows.give_up_summary()

    def _read_window(self) -> None:
        read_at = self._runtime.now()
        with self._lock:
            live, others = self._has_room_for_live(), self._has_room_for_others()
        rows = self._poller.poll(live=live, others=others)
        if not rows:
            return
        with self._lock:
            if window := self._windows.admit(rows):
                self._queue.put(QueuedWindow(window, read_at), is_live=self._poller.found_live)
                self._may_publish.notify_all()

    def _wait_for_room(self) -> bool:
        """Waits until a window may be read; False when the term is to end."""
        with self._lock:
            self._may_read.wait_for(
                lambda: self._tasks.stopping or self._has_room_for_live() or self._has_room_for_others()
            )
            return not self._tasks.stopping

    def _has_room_for_live(self) -> bool:
        # The backlog is read too: live rows wait for that only when some of them are there already.
        is_enough = self._queue.live_is_full or (self._queue.has_live and not self._queue.has_others)
        if not self._poller.is_split or is_enough or self._windows.full:
            return False
        return not self._live_rows.too_many_wait or self._poller.more_live_rows_settled

    def _has_room_for_others(self) -> bool:
        # Ahead of the publisher only while much comes: few rows gain nothing by waiting in a queue. And not while live
        # rows wait for a summary of keys: it is made sooner if the backlog takes less of the database's time.
        poller = self._poller
        is_early = self._publishing and (poller.is_summarising or not (poller.found_many or poller.is_split))
        return not (self._queue.has_others or self._windows.full or is_early)

    def _join_queue(self) -> None:
        with self._lock:
            self._queue.join()

    def _publish_windows(self) -> None:
        try:
            while (work := self._to_publish()) is not None:
                window, read_at, proved = work
                if window is None:
                    self._publish_no_rows()
                else:
                    self._publish(window, read_at)
                with self._lock:
                    self._publishing = False
                    self._may_read.notify_all()
                if proved:
                    proved()
        finally:
            with self._lock:
                self._publisher_done = True
                self._may_purge.notify_all()

    def _to_publish(self) -> tuple[Window | None, float, Proved | None] | None:
        """Waits for a window or a challenge; None when the term is to end.

        An idle leader commits a record without a window, once: a record that named deleted rows for ever would do harm
        if their ids were given again to rows with the same creation time. A leader also commits one to measure how long
        a transaction takes by itself, as `core.rows_beside_live` explains.
        """
        with self._lock:
            self._may_publish.wait_for(
                lambda: self._tasks.stopping or self._queue or self._challenged,
                CLEAR_PROGRESS_SECONDS if self._names_rows else None,
            )
            if self._tasks.stopping:
                return None
            proved, self._challenged = self._challenged, None
            is_to_measure = self._live_rows.came_lately and not self._rows_beside_live.is_measured
            taken = [] if is_to_measure else self._queue.take()
            window = self._windows.publish_next([each.window for each in taken]) if taken else None
            self._publishing = True
            self._may_read.notify_all()
            return window, min((each.read_at for each in taken), default=0.0), proved

    def _publish_no_rows(self) -> None:
        """Commit a progress record alone."""
        while True:
            with self._lock:  # Read it for each attempt: rows that were purged since need not be named.
                unpurged = self._windows.unpurged
            began = self._runtime.now()
            if self._commit((), self._progress(0, unpurged)):
                break
        if not (self._live_rows.in_use and self._rows_beside_live.is_measured):
            self._rows_beside_live.measured(self._runtime.now() - began)

    def _publish(self, window: Window, read_at: float) -> None:
        began = read_at
        while window.rows:
            if (progress := self._fitting_progress(window, read_at)) is None:
                return
            began = self._runtime.now()
            try:
                if self._commit(window.rows, progress):
                    break
            except RowsRefused as refused:
                self._handle_refused_rows(window, refused)
                self._bad_row_handler.hold(refused.away)
                self._bad_row_handler.hold_maybe_oversize(
                    row for row in window.rows if row.id in refused.maybe_oversize
                )
            except TopicsAway as away:
                self._bad_row_handler.hold(away.topics)
        with self._lock:
            rows = self._windows.mark_published(window)
            self._published.append(window)
            if len(self._published) == 1 or self._purge_is_due():
                self._may_purge.notify_all()
        ended = self._runtime.now()
        if not self._live_rows.in_use:
            self._rows_beside_live.published(len(rows), ended - began)
        self._observe(WindowPublished(self._shard, len(rows), ended - read_at, ended - began, rows))

    def _fitting_progress(self, window: Window, read_at: float) -> ProgressRecord | None:
        """The record for `window`, so small that Kafka takes it; None when the term is to end.

        Ids that are far apart take many bytes. So the record names fewer rows: what has been published is purged first,
        and if that is not enough, the window becomes two.
        """
        with self._lock:
            while True:
                progress = self._progress(len(window.rows), self._windows.publications_with(window))
                if progress.most_bytes <= self._log.largest_progress_bytes:
                    return progress
                if unpurged := len(self._windows.unpurged):
                    self._has_purged.wait_for(lambda: self._tasks.stopping or len(self._windows.unpurged) < unpurged)
                    if self._tasks.stopping:
                        return None
                elif len(window.rows) > 1:
                    self._queue.put_back(QueuedWindow(self._windows.halve(window), read_at))
                else:
                    return progress

    def _commit(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        """Call `TransactionalLog.publish`, on a producer none of whose earlier requests can still arrive."""
        with self._answer_wait:
            return self._transact(rows, progress)

    def _transact(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        if self._log.in_doubt:
            self._replace_producer()
        self._outcome_unknown = self._outcome_unknown or bool(rows)
        try:
            committed = self._timed_log.publish(rows, progress)
        except (RowsRefused, TopicsAway, LogUnavailable):
            self._outcome_unknown = False
            raise
        self._outcome_unknown = False
        if committed:
            self._names_rows = bool(progress.publications)
        return committed

    def _replace_producer(self) -> None:
        """Fence our own last producer.

        Raises:
            Fenced: another harvester leads. We read the record before the fence, so that a zombie does not fence its
                successor, and again after it, when nobody else can write.
        """
        require_own_record(self._log.read_progress(fenced=False).record, self._leader_id)
        self._fence(has_fenced=True)
        require_own_record(self._log.read_progress(fenced=True).record, self._leader_id)

    def _fence(self, *, has_fenced: bool) -> None:
        """Fence the shard's producers, by the rules of `core.transactional_id_generations`.

        Args:
            has_fenced: whether this term has fenced them before. Only then may it continue under another transactional
                id if the last transaction cannot end.

        Raises:
            TransactionStuck: the last transaction cannot end, and this term has not fenced before.
            Fenced: another harvester leads.
        """
        try:
            self._log.fence(self._generation)
        except TransactionStuck:
            if not has_fenced:
                raise
            self._log.close()
            self._log.read_progress(fenced=True)  # Raises LogUnavailable as long as its end is not decided there.
            with self._answer_wait.interrupted_by(self._publisher_store_wait):
                self._generation = self._store.raise_generation(self._slice, self._generation)
            self._log.fence(self._generation)
            self._observe(GenerationRaised(self._shard, self._generation))
        with self._answer_wait.interrupted_by(self._publisher_store_wait):
            self._store.check_leads()

    def _handle_refused_rows(self, window: Window, refused: RowsRefused) -> None:
        """Park or dead-letter the refused rows, so that the rest of the window can be published.

        Postgres records the parked or dead-lettered rows before any later row of their keys is published. If it refuses
        to dead-letter a row, the row is parked. If it refuses to park one, the key is held back and tried again.
        """
        refusals = refused.refusals
        if self._bad_rows == "dead-letter":
            refusals = self._dead_letter(window, refused)
        self._bad_row_handler.park(first_bad_rows(window.rows, refusals))

    def _dead_letter(self, window: Window, refused: RowsRefused) -> dict[int, Refusal]:
        """Dead-letter the refused rows. Returns the refusals of rows that Postgres refuses to move."""
        bad = [BadRow(row, refused.refusals[row.id]) for row in window.rows if row.id in refused.refusals]
        stuck = self._bad_row_handler.dead_letter(bad)
        with self._lock:
            window.leave_out_dead_letters([row for row in bad if row.row.id not in stuck])
        return stuck

    def _progress(self, records: int, publications: tuple[Publication, ...]) -> ProgressRecord:
        return ProgressRecord(
            self._store.identity, self._leader_id, records, publications, self._generation, self._terms.number
        )

    def _purge_windows(self) -> None:
        while windows := self._to_purge():
            publications = [each for window in windows for each in window.publications]
            with self._store_wait:
                seconds = took(self._runtime, partial(self._store.purge, publications))
            with self._lock:
                self._windows.mark_purged(windows)
                self._may_read.notify_all()
                self._has_purged.notify_all()
            self._observe(WindowPurged(self._shard, rows_in(windows), seconds))

    def _to_purge(self) -> list[Window]:
        """Waits for published windows, and a little for more; none when the publisher has ended and all are purged."""
        with self._lock:
            self._may_purge.wait_for(lambda: self._published or self._publisher_done)
            self._may_purge.wait_for(self._purge_is_due, PURGE_REST_SECONDS)
            windows, self._published = self._published, []
            return windows

    def _purge_is_due(self) -> bool:
        return self._publisher_done or self._tasks.stopping or rows_in(self._published) >= PURGE_ROWS
