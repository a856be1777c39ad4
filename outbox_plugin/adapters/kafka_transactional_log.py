"""Kafka as the harvester's log in exactly-once delivery: transactions, fencing, and the progress record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import NoReturn

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_plugin.adapters.kafka_clients import (
    REQUEST_TIMEOUT_SECONDS,
    compresses,
    largest_record_bytes,
    producer_config,
    refused_property,
    transaction_error,
)
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.progress_reader import ProgressReader
from outbox_plugin.adapters.record_sender import RecordSender, away_by_clock
from outbox_plugin.adapters.stalled_partition import which_stalled, why_stalled, why_without_coordinator
from outbox_plugin.core.last_progress import LastProgress, Numbering
from outbox_plugin.core.progress import LARGEST_BODY, ProgressRecord
from outbox_plugin.core.repeated_requests import RETRY_BACKOFF_MS, may_have_been_repeated
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Signer, Slot
from outbox_plugin.errors import LogUnavailable, RowsRefused, TopicsAway, TransactionStuck
from outbox_plugin.settings import Settings

COMMIT_TIMEOUT_SECONDS = 30.0
_FENCE_SECONDS = 0.05
_PATIENCE_SECONDS = 0.5  # How long a blocking call waits before it checks whether to go on waiting.
_FLUSH_SECONDS = 0.1
_ABORT_SECONDS = 0.1
STUCK_SECONDS = 5.0  # A decided transaction may take this long to end where nothing is wrong.
STALLED_SECONDS = 1.0  # After this time without an acknowledgement, check whether partitions have a leader.
SILENT_SECONDS = 5.0  # If leaders and replicas in sync stay the same for so long, too few are in sync.
_WHY_SECONDS = 2.0  # How long Kafka may take to say why a partition stalls. The flush does not go on meanwhile.
_RECORD_BYTES = 1_000  # An upper bound of what a progress record has besides its value.
_SMALLEST_PROGRESS_BYTES = 2_000


# Kafka does not say which topic it means. If Kafka has failed the transaction before all rows were handed over, the
# client reports its state alone (_STATE).
_MAY_BE_FORBIDDEN = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._STATE}


class KafkaTransactionalLog:
    """`TransactionalLog` on transactional producers, one after the other; each `fence` makes a new one."""

    def __init__(
        self,
        settings: Settings,
        names: KafkaNames,
        slice_: Slice,
        signer: Signer,
        should_wait: Callable[[], bool],
        reserved: Callable[[str], str | None],
    ) -> None:
        """Nothing is connected before `fence`.

        Args:
            settings: which Kafka.
            names: what the group calls its topics and ids.
            slice_: the shard.
            signer: signs progress records, and verifies them.
            should_wait: returns whether waiting still makes sense; called now and then.
            reserved: returns why a topic is not for events; None where it is.
        """
        self._settings = settings
        self._names = names
        self._slice = slice_
        self._signer = signer
        self._numbering = Numbering()
        self._should_wait = should_wait
        self._reserved = reserved
        self._records = RecordSender(reserved, should_wait)
        self._producer: Producer | None = None
        self._transactional_id = ""  # Of the last producer.
        self._has_fenced = False
        self._in_doubt = True
        self._largest_progress = min(LARGEST_BODY, largest_record_bytes(settings) - _RECORD_BYTES)

    @property
    def in_doubt(self) -> bool:
        """Whether a request of the present producer may still arrive: `fence` before the next `publish`."""
        return self._in_doubt

    @property
    def largest_progress_bytes(self) -> int:
        """How many bytes a progress record may have: what the client takes; less, once a broker has refused one."""
        return self._largest_progress

    @property
    def _open(self) -> Producer:
        if self._producer is None:
            raise LogUnavailable("Kafka: the term's producer has been closed")
        return self._producer

    def fence(self, generation: int) -> None:
        """Replace the producer by a new one of this generation, which fences all earlier ones of the slice.

        KIP-98's InitProducerId raises the epoch and aborts the transaction that was open.

        Raises:
            TransactionStuck: Kafka answers CONCURRENT_TRANSACTIONS, for as long as we wait.
            InvalidSetting: OUTBOX_KAFKA holds something that librdkafka does not take.
            StoreUnavailable: the database does not say which topics are for events, when a transaction is stuck.
        """
        self.close()
        self._producer = self._new_producer(generation)
        began, concurrent = time.monotonic(), False
        while True:
            try:
                # librdkafka may look for the coordinator before it knows a broker. By itself it looks again only
                # after half a second, but at once when it is called again. So each call is short.
                self._open.init_transactions(_FENCE_SECONDS)
                break
            except KafkaException as error:
                problem, seconds = error.args[0], time.monotonic() - began
                concurrent = concurrent or problem.code() == KafkaError.CONCURRENT_TRANSACTIONS
                if concurrent and seconds > STUCK_SECONDS:
                    raise TransactionStuck(self._why_stuck()) from error.with_traceback(None)
                again = problem.code() == KafkaError._TIMED_OUT or problem.retriable()
                if not again or seconds > REQUEST_TIMEOUT_SECONDS or not self._should_wait():
                    reason = self._why_without_coordinator(is_suspect=True) if again and self._should_wait() else None
                    raise LogUnavailable(f"Kafka, fencing: {reason or problem.str()}") from error.with_traceback(None)
        self._has_fenced, self._in_doubt = True, False

    def _why_stuck(self) -> str:
        """Why the shard's last transaction has not ended. The progress topic's partition is known to be part of it.

        Which topics of events are, is not known if another harvester has begun it. If it was ours, we go on under
        another transactional id, and no time is to be lost.
        """
        if (reason := self._why_progress_stalled()) is None:
            reason = (
                "it cannot end before each partition that it touched, also of the progress topic, has a leader and "
                "enough replicas in sync"
            )
            if not self._has_fenced and (stalled := self._which_stalled()) is not None:
                reason += f"; of those for events, these lack that now: {stalled}"
        return f"Kafka, fencing: the shard's last transaction has not ended; {reason}"

    def _which_stalled(self) -> str | None:
        """The partitions of topics of events that take no records now; None if Kafka names none soon."""

        def is_for_events(topic: str) -> bool:
            return self._reserved(topic) is None

        return which_stalled(self._open, self._settings, is_for_events, self._patience())

    def _why_without_coordinator(self, *, is_suspect: bool) -> str | None:
        """Why no broker coordinates our transactions; None if one may, or if Kafka does not say soon."""
        return why_without_coordinator(
            self._open, self._settings, self._transactional_id, self._patience(), is_suspect=is_suspect
        )

    def _new_producer(self, generation: int) -> Producer:
        self._transactional_id = self._names.transactional_id(self._slice, generation)
        config = producer_config(
            self._settings, transactional_id=self._transactional_id, retry_backoff_ms=RETRY_BACKOFF_MS
        )
        try:
            return Producer({**config, "on_delivery": self._records.on_delivery})
        except KafkaException as error:
            raise refused_property(error) from None

    def read_progress(self, *, fenced: bool, accepts_unsigned: bool = False) -> LastProgress:
        """The shard's last progress record; `fenced` says that no open transaction can hide a later one."""
        with closing(ProgressReader(self._settings, self._names, self._signer, self._should_wait)) as reader:
            last = reader.read(self._slice, to_the_end=fenced, accepts_unsigned=accepts_unsigned)
        self._numbering.read_to(last.end)
        return last

    def former(self, slice_: Slice) -> KafkaTransactionalLog:
        """The log of a shard of an earlier layout; the caller closes it."""
        return KafkaTransactionalLog(
            self._settings, self._names, slice_, self._signer, self._should_wait, self._reserved
        )

    def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        """Publish `rows` in their order and `progress` in one transaction. Returns False if nothing was published.

        Raises:
            RowsRefused: Kafka refuses rows for what they are.
            TopicsAway: some topics cannot be written to now.
            LogUnavailable: nothing was published; try again.
            Fenced: another leader has fenced this one.
            OutcomeUnknown: the transaction may have been committed.
        """
        records = self._records
        records.reset()
        records.check_rows(rows)
        records.check_topics(self._open, rows)
        self._in_doubt = True  # Until the commit has shown that no request of it can still arrive.
        try:
            self._open.begin_transaction()
            # Sent first: its partition is added to the transaction while rows are handed over.
            self._produce_progress(progress)
            records.produce(self._open, rows)
            if refusals := records.refusals:
                raise RowsRefused(refusals)
            if not self._flush():
                return False
        except KafkaException as error:
            self._explain(error, unpublished=True)
            return False
        began = time.monotonic()
        try:
            self._commit()
        except KafkaException as error:  # librdkafka sends no EndTxn if a delivery failed.
            self._explain(error, unpublished=records.any_failed)
            return False
        self._in_doubt = may_have_been_repeated(time.monotonic() - began)
        self._numbering.committed()
        records.acknowledged()
        return True

    def _produce_progress(self, progress: ProgressRecord) -> None:
        topic, partition = self._names.progress_topic, self._slice.number
        key, value = self._slice.name.encode(), self._numbering.numbered(progress).encode()
        headers = self._signer.sign(Slot("progress", topic, partition), key, value)
        self._open.produce(topic, key=key, value=value, partition=partition, headers=headers)

    def _flush(self) -> bool:
        """Wait for the acknowledgements, so that the commit's time is that of EndTxn alone.

        Returns False if they do not come because a partition has no leader, or perhaps too few replicas in sync. This
        transaction touches that partition, or the last one did, and has therefore not ended. The caller does not
        commit then, so nothing is published.

        Raises:
            LogUnavailable: they do not come for another reason, or the term is to end first; nothing is published.
            KafkaException: the producer was fenced.
        """
        waiting, since, looks = len(self._open), time.monotonic(), 0
        while waiting and not self._records.any_failed:
            if not self._should_wait():
                raise LogUnavailable("Kafka had not acknowledged what was sent when the term had to end")
            before, waiting = waiting, self._open.flush(_FLUSH_SECONDS)
            now = time.monotonic()
            if waiting != before:
                since, looks = now, 0
            elif now - since > COMMIT_TIMEOUT_SECONDS:
                raise LogUnavailable("Kafka does not acknowledge what was sent")
            elif now - since > STALLED_SECONDS * (looks + 1):
                looks += 1
                if now - since > SILENT_SECONDS:
                    self._check_own_partitions()
                if not self._should_wait():
                    continue
                if self._records.without_leader(self._open) and looks > 1:  # One that moves has none for a moment.
                    return False
                if self._records.give_up_silent(self._open, SILENT_SECONDS):
                    return False
        return True

    def _check_own_partitions(self) -> None:
        """Check whether the progress topic takes no records, or no broker coordinates our transactions.

        No transaction can go on without them.

        Raises:
            LogUnavailable: so it is.
        """
        reason = self._why_progress_stalled()
        if reason is None and self._should_wait():
            reason = self._why_without_coordinator(is_suspect=False)
        if reason is not None:
            raise LogUnavailable(f"Kafka: {reason}")

    def _why_progress_stalled(self) -> str | None:
        """Why the progress topic takes no records; None if it may take them, or if Kafka does not say soon."""
        topic, partition = self._names.progress_topic, self._slice.number
        reason = why_stalled(self._open, self._settings, topic, partition, self._patience())
        return None if reason is None else f"the topic {topic} takes no records: {reason}"

    def _patience(self) -> Callable[[], bool]:
        """Returns whether it makes sense to wait for an answer that says why a partition stalls."""
        deadline = time.monotonic() + _WHY_SECONDS
        return lambda: self._should_wait() and time.monotonic() < deadline

    def _commit(self) -> None:
        """Commit, and wait for the answer as long as `should_wait` returns True, `COMMIT_TIMEOUT_SECONDS` at most."""
        deadline = time.monotonic() + COMMIT_TIMEOUT_SECONDS
        while True:
            try:
                self._open.commit_transaction(_PATIENCE_SECONDS)
                return
            except KafkaException as error:
                if error.args[0].txn_requires_abort() or error.args[0].code() != KafkaError._TIMED_OUT:
                    raise
                if time.monotonic() > deadline or not self._should_wait():
                    raise

    def _explain(self, error: KafkaException, *, unpublished: bool) -> None:
        """Raise what a failed transaction means; return if nothing was published and a retry may succeed.

        Nothing aborts the transaction here: the abort might arrive late, and hit another one of the same producer. The
        next producer's fence aborts it.
        """
        error.with_traceback(None)  # Its frames hold the producer: see `close`.
        meaning = transaction_error(error.args[0], "in a transaction", unpublished=unpublished)
        if not isinstance(meaning, LogUnavailable):
            raise meaning from error
        try:
            self._open.purge()
            self._open.flush(_PATIENCE_SECONDS)  # Calls `on_delivery` for each record that failed.
        except KafkaException as fatal:  # Where the first error did not say so, the producer was fenced.
            raise transaction_error(fatal.args[0], "in a transaction", unpublished=unpublished) from error
        records = self._records
        is_untimely, topics = error.args[0].code() == KafkaError.INVALID_TIMESTAMP, records.refused_topics()
        sent = records.interpret_failures(blames_clock=is_untimely)
        if is_untimely and not (sent.refusals or sent.narrowed):  # No row whose own timestamp may be at fault.
            self._blame_the_clock(topics, error)
        refusals = sent.refusals
        if not (refusals or sent.narrowed) and error.args[0].code() in _MAY_BE_FORBIDDEN:
            refusals = records.forbidden_rows(self._settings)
        if refusals:
            oversize = records.refusals_by_size()
            if compresses(self._settings):  # Then a larger record may fit where a smaller one does not.
                raise RowsRefused(refusals, maybe_oversize=oversize.keys()) from error
            raise RowsRefused(oversize | refusals) from error
        if self._names.progress_topic in sent.too_large and self._largest_progress > _SMALLEST_PROGRESS_BYTES:
            self._largest_progress //= 2
            return
        if sent.narrowed:
            return
        if sent.failures:
            raise LogUnavailable(f"Kafka, delivering: {sent.failures[0].str()}") from error
        raise meaning from error

    def _blame_the_clock(self, topics: set[str], error: KafkaException) -> NoReturn:
        away = away_by_clock(error.args[0].str())
        if not topics or self._names.progress_topic in topics:
            raise LogUnavailable(f"Kafka: {away.reason}") from error
        raise TopicsAway(dict.fromkeys(topics, away)) from error

    def close(self) -> None:
        """Drop the producer. The next leader's fence ends an open transaction. Safe to call twice.

        The producer ends when nothing refers to it any more. `Producer.close` would first wait until Kafka has answered
        an abort, however long that takes.
        """
        producer, self._producer = self._producer, None
        if producer is not None:
            # Without a transaction, or fenced, a producer may refuse. It must be let go of all the same.
            with suppress(KafkaException):
                # librdkafka 2.16 ends the process if a producer is dropped just when it adds the first partition to its
                # transaction. Once it aborts, it adds none. An abort that arrives late meets another epoch. After one
                # that arrives in time, the fence finds no transaction, and writes no marker of its own epoch. Brokers
                # then refuse a late Produce request because they verify that its transaction has the partition.
                producer.abort_transaction(_ABORT_SECONDS)
            with suppress(KafkaException):
                producer.purge()
                producer.flush(0)
