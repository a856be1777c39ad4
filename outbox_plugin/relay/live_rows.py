"""Reads live rows before a backlog, as `core.backlog` explains: which of them may go, and which must wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple

from outbox_plugin.core.backlog import SummaryRequest
from outbox_plugin.core.id_ranges import IdRanges
from outbox_plugin.core.key_summary import KeySummary
from outbox_plugin.core.postgres_ports import ReadRequest, WindowStore
from outbox_plugin.core.row import OutboxRow, Rows, fields_of
from outbox_plugin.errors import ServerUnavailable
from outbox_plugin.relay.events import KeysSummarised, LiveRowsJoined, LiveRowsLeftOut, Observer
from outbox_plugin.relay.task_group import TaskGroup

LATELY_SECONDS = 1.0
MAX_WAITING_RANGES = 5_000  # A read that names them takes some 10 ms more.


class Summary(NamedTuple):
    """The ordering keys of all rows with ids up to `bound`: of `rows` at most, in so many seconds."""

    bound: int
    keys: KeySummary
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SummaryEnd:
    """The end of an attempt to summarise keys: the summary, or None if it could not be made."""

    summary: Summary | None


class Found(NamedTuple):
    """The rows of a read that may go on; the highest id and the number of all rows that it returned."""

    rows: Sequence[OutboxRow]
    last_id: int | None
    number: int

    @classmethod
    def all(cls, rows: Sequence[OutboxRow]) -> Found:
        """All rows of a read may go on."""
        return cls(rows, rows[-1].id if rows else None, len(rows))


class LiveRows:
    """Belongs to the stage that reads. Keys are summarised on a thread of its own."""

    def __init__(
        self, shard: int, store: WindowStore, tasks: TaskGroup, observe: Observer, join_queues: Callable[[], None]
    ) -> None:
        """No row goes before another one yet.

        Args:
            shard: for the events that are observed.
            store: where the rows are.
            tasks: those of the term; a summary is given up when they are to stop.
            observe: is told of summaries.
            join_queues: lets the live rows that have been read go before all rows that are read later.
        """
        self._shard = shard
        self._store = store
        self._tasks = tasks
        self._observe = observe
        self._join_queues = join_queues
        self._keys: KeySummary | None = None  # Of the backlog; None where there is none.
        self._waiting = IdRanges()  # Live rows that were read, and whose keys may be in the summary.
        self._left_out = 0  # How many they are, with those that are forgotten.
        self._found_at: float | None = None  # When a read last found live rows that may go.
        self._ended: SummaryEnd | None = None  # What the thread came to; `tasks.lock` guards it.

    @property
    def in_use(self) -> bool:
        """Whether live rows are read before a backlog."""
        return self._keys is not None

    @property
    def came_lately(self) -> bool:
        """Whether live rows went before a backlog a short time ago, so that others are likely to come soon."""
        now = self._tasks.runtime.now()
        return self.in_use and self._found_at is not None and now - self._found_at < LATELY_SECONDS

    @property
    def too_many_wait(self) -> bool:
        """Whether no more live rows are to be read for now, as each read names those that wait."""
        return len(self._waiting.ranges) > MAX_WAITING_RANGES

    def forget_up_to(self, id_: int) -> None:
        """The next read begins above this id, and need not name the rows up to it that wait."""
        self._waiting = self._waiting.above(id_)

    @property
    def waiting(self) -> IdRanges:
        """The live rows that were left out. Reads of live rows skip them; they are read in line, after the backlog."""
        return self._waiting

    def summarise_keys(self, request: SummaryRequest) -> None:
        """Begin to summarise keys; `take_summary` returns the summary when it has been made.

        A batch's own last id is the better bound: the rows that were committed behind the batch are live, and would
        else wait for all of it; and so would all later rows of their keys.

        Raises:
            StoreUnavailable: Postgres does not do as asked.
        """
        end = self._store.end_of_batch(request.bound)
        bound = request.bound if end is None else max(end, request.least_bound)
        self._tasks.spawn(partial(self._summarise, bound, request.ids), "summary")

    def take_summary(self) -> SummaryEnd | None:
        """The end of the attempt to summarise keys, if it has ended since the last call."""
        with self._tasks.lock:
            ended, self._ended = self._ended, None
        return ended

    def begin(self, summary: Summary) -> None:
        """From now on, live rows go first: those above the summary's bound whose keys it does not hold."""
        self._join_queues()
        self._keys, self._waiting, self._left_out = summary.keys, IdRanges(), 0
        self._observe(KeysSummarised(self._shard, summary.rows, summary.seconds, None))

    def end(self) -> None:
        """The backlog has been read: all rows go in line again."""
        self._join_queues()
        self._keys, self._waiting, self._left_out = None, IdRanges(), 0
        self._observe(LiveRowsJoined(self._shard))

    def give_up_summary(self) -> None:
        """The term ends: no summary is wanted any more. Its thread ends soon."""
        self._store.cancel_key_hashes()

    def read(self, request: ReadRequest) -> Found:
        """Read live rows, and leave out those that must wait.

        Raises:
            StoreUnavailable: Postgres does not do as asked.
        """
        rows = self._store.read(request)
        keys = self._keys
        if not rows or keys is None:
            return Found.all(rows)
        may_go = [not keys.may_hold(key_hash) for key_hash in self._store.key_hashes(rows)]
        if any(may_go):
            self._found_at = self._tasks.runtime.now()
        waiting = [row.id for row, goes in zip(rows, may_go, strict=True) if not goes]
        if waiting:
            self._waiting = IdRanges.union((self._waiting, IdRanges.of(waiting)))
            self._left_out += len(waiting)
            self._observe(LiveRowsLeftOut(self._shard, self._left_out))
        return Found(Rows(list(compress(fields_of(rows), may_go))), rows[-1].id, len(rows))

    def _summarise(self, bound: int, ids: int) -> None:
        began = self._tasks.runtime.now()
        summary = None
        try:
            keys = KeySummary(ids)
            with closing(self._store.key_hashes_up_to(bound, ids)) as hashes:
                for part in hashes:
                    keys.add(part)
                    if self._tasks.stopping:
                        return
            summary = Summary(bound, keys, ids, self._tasks.runtime.now() - began)
        except (ServerUnavailable, MemoryError) as error:
            if self._tasks.stopping:
                return
            reason = str(error) or "there is not enough memory"
            self._observe(KeysSummarised(self._shard, ids, self._tasks.runtime.now() - began, reason))
        with self._tasks.lock:
            self._ended = SummaryEnd(summary)
