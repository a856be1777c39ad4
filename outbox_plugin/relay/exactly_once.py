"""One term of exactly-once delivery: read, publish with progress, purge; three stages overlapped."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from outbox_plugin.core.ids import IdRanges
from outbox_plugin.core.pace import IDLE_FIRST, IDLE_LAST, Backoff
from outbox_plugin.core.ports import Log, OutboxStore
from outbox_plugin.core.progress import ProgressRecord, Publication
from outbox_plugin.core.takeover import left_behind
from outbox_plugin.core.window import ROWS_PER_WINDOW, Window, Windows
from outbox_plugin.relay.events import Observer, TermBegan, WindowPublished, WindowPurged

IDENTITY_CHECK_SECONDS = 1.0
Proved = Callable[[], None]


class ExactlyOnce:
    """Relays one shard for one term.

    Each stage has a thread and takes what the one before it has done; all that they share is guarded by one condition.
    The first stage to fail ends the term, and its error is the term's.
    """

    def __init__(
        self,
        shard: int,
        leader_id: str,
        store: OutboxStore,
        log: Log,
        observe: Observer,
        *,
        adopt: bool = False,
    ) -> None:
        self._shard = shard
        self._leader_id = leader_id
        self._store = store
        self._log = log
        self._observe = observe
        self._adopt = adopt
        self._windows = Windows()
        self._changed = threading.Condition()
        self._read: deque[tuple[Window, float]] = deque()
        self._published: deque[Window] = deque()
        self._stopping = False
        self._publisher_done = False
        self._challenged: Proved | None = None
        self._error: BaseException | None = None

    def take_over(self) -> None:
        """Fence, read the progress record, delete what it proves, and say so in a record of our own.

        Raises:
            ForeignOutbox: the group relays another outbox.
        """
        self._log.fence()
        publications = left_behind(self._log.read_progress(), self._store.identity, adopt=self._adopt)
        recovered = sum(self._store.purge(publication) for publication in publications)
        self._log.publish((), self._progress(0, ()))
        self._observe(TermBegan(self._shard, self._leader_id, recovered))

    def run(self) -> None:
        """Relay until `stop`; returns when every published window has been purged.

        Raises:
            TermEnded, ServerUnavailable, RowRefused: what ended the term.
        """
        stages = [
            threading.Thread(target=self._stage, args=(work,), name=f"outbox-{self._shard}-{name}", daemon=True)
            for name, work in (("read", self._read_windows), ("purge", self._purge_windows))
        ]
        for stage in stages:
            stage.start()
        self._stage(self._publish_windows)
        for stage in stages:
            stage.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ask `run` to end: what has been read but not published is left for the next leader."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def prove(self, proved: Proved) -> None:
        """Commit a transaction soon, to see whether we have been fenced; `proved` is called once it is committed."""
        with self._changed:
            self._challenged = proved
            self._changed.notify_all()

    def _stage(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._stopping = True
                self._changed.notify_all()

    def _read_windows(self) -> None:
        idle = Backoff(IDLE_FIRST, IDLE_LAST)
        checked_at = time.monotonic()
        while (in_flight := self._may_read()) is not None:
            read_at = time.monotonic()
            rows = self._store.read(in_flight, ROWS_PER_WINDOW)
            if rows:
                idle.succeeded()
                with self._changed:
                    self._read.append((self._windows.admit(rows), read_at))
                    self._changed.notify_all()
                continue
            if read_at - checked_at > IDENTITY_CHECK_SECONDS:  # No rows, or no longer our outbox?
                self._store.check_identity()
                checked_at = read_at
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, idle.wait())

    def _may_read(self) -> IdRanges | None:
        """Waits until a window may be read; the ids to leave out, or None when the term is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not (self._read or self._windows.full))
            return None if self._stopping else self._windows.in_flight

    def _publish_windows(self) -> None:
        try:
            while (work := self._to_publish()) is not None:
                window, read_at, proved = work
                if window is None:
                    self._log.publish((), self._progress(0, self._windows.unpurged))
                else:
                    self._publish(window, read_at)
                if proved:
                    proved()
        finally:
            with self._changed:
                self._publisher_done = True
                self._changed.notify_all()

    def _to_publish(self) -> tuple[Window | None, float, Proved | None] | None:
        """Waits for a window or a challenge; None when the term is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._read or self._challenged)
            if self._stopping:
                return None
            proved, self._challenged = self._challenged, None
            window, read_at = self._read.popleft() if self._read else (None, 0.0)
            self._changed.notify_all()
            return window, read_at, proved

    def _publish(self, window: Window, read_at: float) -> None:
        with self._changed:
            progress = self._progress(len(window.rows), self._windows.to_name(window))
        self._log.publish(window.rows, progress)
        with self._changed:
            self._windows.published(window)
            self._published.append(window)
            self._changed.notify_all()
        self._observe(WindowPublished(self._shard, len(window.rows), time.monotonic() - read_at))

    def _progress(self, records: int, publications: tuple[Publication, ...]) -> ProgressRecord:
        return ProgressRecord(self._store.identity, self._leader_id, records, publications)

    def _purge_windows(self) -> None:
        while (window := self._to_purge()) is not None:
            self._store.purge(window.publication)
            with self._changed:
                self._windows.purged(window)
                self._changed.notify_all()
            self._observe(WindowPurged(self._shard, len(window.rows)))

    def _to_purge(self) -> Window | None:
        """Waits for a published window; None when the publisher has ended and all it published has been purged."""
        with self._changed:
            self._changed.wait_for(lambda: self._published or self._publisher_done)
            return self._published.popleft() if self._published else None
