"""Kafka as the harvester's log in exactly-once delivery: transactions, fencing, and the progress record."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_plugin.adapters.kafka import (
    REQUEST_TIMEOUT_SECONDS,
    Names,
    client_config,
    ended,
    refused_property,
)
from outbox_plugin.adapters.progress import read_progress
from outbox_plugin.adapters.records import Records
from outbox_plugin.core.progress import ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.errors import Fenced, LogUnavailable, OutcomeUnknown, RowsRefused
from outbox_plugin.settings import Settings

COMMIT_TIMEOUT_SECONDS = 30.0
_FENCE_SECONDS = 0.05
_PATIENCE_SECONDS = 0.5  # How long a blocking call waits before it looks whether it is still wanted.
_LINGER_MS = 5  # Batches fill while a window is handed over; a flush, and so a commit, cuts it short.


def producer_config(settings: Settings, **ours: Any) -> dict[str, Any]:
    """The configuration of a producer that sends events."""
    return client_config(
        settings,
        partitioner="murmur2_random",  # Records land where Java's clients put them.
        linger_ms=_LINGER_MS,
        batch_num_messages=50_000,
        batch_size=1_000_000,
        queue_buffering_max_messages=1_000_000,
        queue_buffering_max_kbytes=262_144,
        delivery_report_only_error=True,
        **ours,
    )


class KafkaLog:
    """`Log` on one transactional producer, which is thrown away with its term."""

    def __init__(self, settings: Settings, names: Names, slice_: Slice, wanted: Callable[[], bool]) -> None:
        """Make a producer; no connection yet. `wanted` is asked now and then whether waiting still makes sense.

        Raises:
            InvalidSetting: OUTBOX_KAFKA holds something that librdkafka does not take.
        """
        self._settings = settings
        self._names = names
        self._slice = slice_
        self._wanted = wanted
        self._records = Records(wanted)
        # After a delivery that the broker refused, librdkafka has a gap in its sequence numbers: the next transaction
        # fails too ("skipped sequence numbers"), and only its abort renews them.
        self._stumbles = False
        config = producer_config(settings, transactional_id=names.transactional_id(slice_))
        try:
            self._producer: Producer | None = Producer({**config, "on_delivery": self._records.on_delivery})
        except KafkaException as error:
            raise refused_property(error) from None

    @property
    def _open(self) -> Producer:
        if self._producer is None:
            raise LogUnavailable("Kafka: the term's producer has been closed")
        return self._producer

    def fence(self) -> None:
        """See `Log.fence`: KIP-98's InitProducerId raises the epoch and aborts what was open."""
        try:
            # Called on again soon: librdkafka, whose first look for the coordinator may come before it knows a broker,
            # looks again after half a second by itself, but at once when it is called.
            self._while_wanted(self._open.init_transactions, REQUEST_TIMEOUT_SECONDS, fencing=True)
        except KafkaException as error:
            raise LogUnavailable(f"Kafka, fencing: {error.args[0].str()}") from error

    def read_progress(self) -> ProgressRecord | None:
        """See `Log.read_progress`."""
        return read_progress(self._settings, self._names, self._slice)

    def former(self, slice_: Slice) -> KafkaLog:
        """See `Log.former`."""
        return KafkaLog(self._settings, self._names, slice_, self._wanted)

    def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> None:
        """See `Log.publish`."""
        if refused := self._records.judge_topics(self._open, rows):
            raise RowsRefused(refused)
        while not self._published(rows, progress):
            pass  # Nothing was; once more, in smaller groups.

    def _published(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        """Whether it was; if not, nothing was, and the same rows are to be tried again."""
        producer, records = self._open, self._records
        try:
            producer.begin_transaction()
            # First, so that the coordinator learns of its partition, and the broker has it, while rows are handed over.
            producer.produce(
                self._names.progress_topic,
                key=self._slice.name,
                value=progress.encode(),
                partition=self._slice.number,
            )
            records.hand_over(producer, rows)
            if records.refusals:
                self._abort(producer)
                raise RowsRefused(records.refusals)
        except KafkaException as error:
            self._give_up(producer, error, abortable=not error.args[0].fatal())
            return False
        try:
            self._while_wanted(producer.commit_transaction, COMMIT_TIMEOUT_SECONDS)
        except KafkaException as error:
            self._give_up(producer, error)
            return False
        return True

    def _while_wanted(self, call: Callable[[float], object], timeout_seconds: float, *, fencing: bool = False) -> None:
        """Make a blocking `call`, which takes a time-out and may be called on after it, as long as it is wanted."""
        deadline = time.monotonic() + timeout_seconds
        patience = _FENCE_SECONDS if fencing else _PATIENCE_SECONDS
        while True:
            try:
                call(patience)
                return
            except KafkaException as error:
                again = error.args[0].code() == KafkaError._TIMED_OUT or (fencing and error.args[0].retriable())
                if error.args[0].txn_requires_abort() or not again:
                    raise
                if time.monotonic() > deadline or not self._wanted():
                    raise

    def _give_up(self, producer: Producer, error: KafkaException, *, abortable: bool = False) -> None:
        """Abort what can be aborted; returns when the same rows may be tried again, and raises what else it means."""
        meaning = ended(error.args[0], "in a transaction", abortable=abortable)
        if not isinstance(meaning, LogUnavailable):
            raise meaning from error
        self._abort(producer)
        producer.poll(0)  # For the reports of deliveries that failed.
        records = self._records
        records.conclude()
        stumbled, self._stumbles = self._stumbles and not records.failures, bool(records.failures)
        if records.refusals:
            raise RowsRefused(records.refusals) from error
        if records.narrowed or stumbled:
            return
        if records.failures:
            raise LogUnavailable(f"Kafka, delivering: {records.failures[0].str()}") from error
        raise meaning from error

    def _abort(self, producer: Producer) -> None:
        try:
            self._while_wanted(producer.abort_transaction, REQUEST_TIMEOUT_SECONDS)
        except KafkaException as error:
            meaning = ended(error.args[0], "aborting")
            raise meaning if isinstance(meaning, Fenced) else OutcomeUnknown(str(meaning)) from error

    def close(self) -> None:
        """See `Log.close`."""
        producer, self._producer = self._producer, None
        if producer is not None:
            let_go(producer)


def let_go(producer: Producer) -> None:
    """Close a producer without waiting for anything, and without a word: how its term ended has been said."""
    for step in (producer.purge, lambda: producer.flush(0), producer.close):
        # It warns when it cannot abort: the next leader's fence does. One that was fenced may raise that again.
        with warnings.catch_warnings(), suppress(KafkaException):
            warnings.simplefilter("ignore", RuntimeWarning)
            step()
