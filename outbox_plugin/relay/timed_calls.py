"""What a term asks of the servers, with the time that it took told to the observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from outbox_plugin.core.kafka_ports import TransactionalLog
from outbox_plugin.core.progress import ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.relay.events import Observer, TransactionEnded
from outbox_plugin.relay.runtime import Runtime

TRIED_AGAIN = "TriedAgain"  # What `TransactionalLog.publish` means by False.


def took(runtime: Runtime, call: Callable[[], object]) -> float:
    """Make `call`; returns how many seconds it has taken."""
    began = runtime.now()
    call()
    return runtime.now() - began


class AnswerWait:
    """Since when a stage of a term has waited for one answer; other threads may look."""

    def __init__(self, runtime: Runtime) -> None:
        self._now = runtime.now
        self.since: float | None = None  # None while it waits for none.

    def __enter__(self) -> None:
        self.since = self._now()

    def __exit__(self, *_: object) -> None:
        self.since = None

    @contextmanager
    def interrupted_by(self, other: AnswerWait) -> Iterator[None]:
        """The stage waits for another answer first, in the midst of this wait."""
        self.since = None
        try:
            with other:
                yield
        finally:
            self.since = self._now()


def earliest(*waits: AnswerWait) -> float | None:
    """Since when the longest of several waits has lasted; None while there is none."""
    return min((since for wait in waits if (since := wait.since) is not None), default=None)


class TimedLog:
    """`TransactionalLog.publish`, timed."""

    def __init__(self, shard: int, log: TransactionalLog, runtime: Runtime, observe: Observer) -> None:
        """Nothing is called yet.

        Args:
            shard: for the events that are observed.
            log: is called, and timed.
            runtime: has the clock.
            observe: is told how long each call took.
        """
        self._shard = shard
        self._log = log
        self._now = runtime.now
        self._observe = observe

    def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        """Publish, as `TransactionalLog.publish` does, and report how long it took, and how it ended."""
        began, error_type = self._now(), None
        try:
            committed = self._log.publish(rows, progress)
            error_type = None if committed else TRIED_AGAIN
        except Exception as error:
            error_type = type(error).__name__
            raise
        finally:
            self._observe(TransactionEnded(self._shard, self._now() - began, error_type))
        return committed
