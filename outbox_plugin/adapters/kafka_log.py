"""Kafka as the harvester's log: transactions, fencing, and the progress record."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from outbox_plugin.adapters.kafka import (
    REQUEST_TIMEOUT_SECONDS,
    Names,
    client_config,
    ended,
    refusal,
    refused_property,
)
from outbox_plugin.core.progress import ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import LogUnavailable, OutcomeUnknown, RowRefused
from outbox_plugin.settings import Settings

COMMIT_TIMEOUT_SECONDS = 30.0
_PATIENCE_SECONDS = 0.5  # How long a blocking call waits before it looks whether it is still wanted.
_TAIL_RECORDS = 32  # How far from its end the progress topic is read at first; markers take offsets too.
_ROWS_OWN_FAULT = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_MSG,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
}
_NO_LEADER_YET = {
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}


def producer_config(settings: Settings, names: Names, shard: int) -> dict[str, Any]:
    """The transactional producer's configuration for one shard."""
    return client_config(
        settings,
        transactional_id=names.transactional_id(shard),
        partitioner="murmur2_random",  # Records land where Java's clients put them.
        linger_ms=0,
        batch_num_messages=50_000,
        batch_size=1_000_000,
        queue_buffering_max_messages=1_000_000,
        queue_buffering_max_kbytes=262_144,
        delivery_report_only_error=True,
    )


class KafkaLog:
    """`Log` on one transactional producer, which is thrown away with its term."""

    def __init__(self, settings: Settings, names: Names, shard: int, wanted: Callable[[], bool]) -> None:
        """Make a producer; no connection yet. `wanted` is asked now and then whether waiting still makes sense.

        Raises:
            InvalidSetting: OUTBOX_KAFKA holds something that librdkafka does not take.
        """
        self._settings = settings
        self._names = names
        self._shard = shard
        self._wanted = wanted
        self._delivery_error: tuple[KafkaError, str] | None = None
        config = producer_config(settings, names, shard)
        try:
            self._producer: Producer | None = Producer({**config, "on_delivery": self._failed})
        except KafkaException as error:
            raise refused_property(error) from None

    def _failed(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._delivery_error is None:
            self._delivery_error = error, f"topic {message.topic()}, key {message.key()!r}"

    @property
    def _open(self) -> Producer:
        if self._producer is None:
            raise LogUnavailable("Kafka: the term's producer has been closed")
        return self._producer

    def fence(self) -> None:
        """See `Log.fence`: KIP-98's InitProducerId raises the epoch and aborts what was open."""
        try:
            self._while_wanted(self._open.init_transactions, REQUEST_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise LogUnavailable(f"Kafka, fencing: {error.args[0].str()}") from error

    def read_progress(self) -> ProgressRecord | None:
        """See `Log.read_progress`."""
        return read_progress(self._settings, self._names, self._shard)

    def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> None:
        """See `Log.publish`."""
        producer = self._open
        self._delivery_error = None
        try:
            producer.begin_transaction()
            self._produce(producer, rows)
            producer.produce(
                self._names.progress_topic,
                key=str(self._shard),
                value=progress.encode(),
                partition=self._shard,
            )
            self._while_wanted(producer.commit_transaction, COMMIT_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise self._given_up(producer, error.args[0]) from error
        except RowRefused:
            self._abort(producer)
            raise

    def _produce(self, producer: Producer, rows: Sequence[OutboxRow]) -> None:
        produce = producer.produce
        for row in rows:
            id_, _, topic, key, value, names, texts, _ = row
            if len(names) != len(texts):
                raise RowRefused(f"row {id_}: {len(names)} header keys, but {len(texts)} header values")
            headers: list[tuple[str, str | bytes | None]] = list(zip(names, texts))  # noqa: B905 - as checked.
            while True:
                try:
                    produce(topic, value, key, headers=headers)
                    break
                except BufferError:  # librdkafka's queue is full: let it drain.
                    producer.poll(_PATIENCE_SECONDS)
                except KafkaException as error:
                    if error.args[0].code() in _ROWS_OWN_FAULT:
                        raise RowRefused(f"row {id_}, topic {topic}: {error.args[0].str()}") from error
                    raise

    def _while_wanted(self, call: Callable[[float], object], timeout_seconds: float) -> None:
        """Make a blocking `call`, which takes a time-out and may be called on after it, as long as it is wanted."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                call(_PATIENCE_SECONDS)
                return
            except KafkaException as error:
                timed_out = error.args[0].code() == KafkaError._TIMED_OUT and not error.args[0].txn_requires_abort()
                if not timed_out or time.monotonic() > deadline or not self._wanted():
                    raise

    def _given_up(self, producer: Producer, error: KafkaError) -> Exception:
        """Abort what can be aborted; returns what the failed transaction means."""
        meaning = ended(error, "in a transaction")
        if isinstance(meaning, LogUnavailable):
            try:
                self._abort(producer)
            except OutcomeUnknown as unknown:
                return unknown
            if self._delivery_error and self._delivery_error[0].code() in _ROWS_OWN_FAULT:
                failed, where = self._delivery_error
                return RowRefused(f"a row for {where}: {failed.str()}")
        return meaning

    def _abort(self, producer: Producer) -> None:
        try:
            self._while_wanted(producer.abort_transaction, REQUEST_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise OutcomeUnknown(f"Kafka, aborting: {error.args[0].str()}") from error

    def close(self) -> None:
        """See `Log.close`."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        producer.purge()
        producer.flush(0)
        with warnings.catch_warnings():  # It warns when it cannot abort: the next leader's fence does.
            warnings.simplefilter("ignore", RuntimeWarning)
            producer.close()


def read_progress(settings: Settings, names: Names, shard: int) -> ProgressRecord | None:
    """The shard's last committed progress record; None if there is none. Fences nobody.

    Raises:
        LogUnavailable: Kafka does not answer in time.
        ServerRefused: we may not read the topic.
        MalformedProgress: what is there is no progress record.
    """
    partition = TopicPartition(names.progress_topic, shard)
    config = client_config(
        settings,
        group_id=names.leader_group,  # Required by the client; nothing is committed to it.
        enable_auto_commit=False,
        enable_partition_eof=True,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        fetch_wait_max_ms=20,
    )
    try:
        with closing(Consumer(config)) as consumer:
            first, end = _bounds(consumer, partition)
            reach = _TAIL_RECORDS
            while True:
                start = max(first, end - reach)
                body = _last_value(consumer, TopicPartition(partition.topic, partition.partition, start))
                if body is not None:
                    return ProgressRecord.parse(body)
                if start <= first:
                    return None
                reach *= 8
    except KafkaException as error:
        raise refusal(error.args[0], settings) from error


def _bounds(consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """The partition's first offset and its end; waits while it has no leader yet, as right after its creation."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while True:
        try:
            first, end = consumer.get_watermark_offsets(partition, timeout=REQUEST_TIMEOUT_SECONDS)
            return first, end
        except KafkaException as error:
            if error.args[0].code() not in _NO_LEADER_YET or time.monotonic() > deadline:
                raise
            consumer.poll(0.05)


def _last_value(consumer: Consumer, start: TopicPartition) -> bytes | None:
    """The value of the last committed record from `start` on; None if there is none."""
    consumer.assign([start])
    last: bytes | None = None
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        message = consumer.poll(_PATIENCE_SECONDS)
        if message is None:
            continue
        if (error := message.error()) is None:
            last = message.value()
        elif error.code() == KafkaError._PARTITION_EOF:
            return last
        elif error.fatal() or not error.retriable():
            raise KafkaException(error)
    raise LogUnavailable(f"Kafka: the progress record was not read within {REQUEST_TIMEOUT_SECONDS:.0f} s")
