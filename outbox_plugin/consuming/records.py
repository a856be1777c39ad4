"""Reads the records of a range in this process, as a `read_committed` consumer sees them."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox_plugin.adapters.kafka_clients import client_config, connection_error, readable_headers
from outbox_plugin.core.event_identity import event_identity
from outbox_plugin.core.topic_ranges import TopicRange
from outbox_plugin.errors import LogUnavailable, OutboxError
from outbox_plugin.inbox.received import Received
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.consuming")

READ_SECONDS = 600.0
_BATCH = 10_000


class RecordsVanished(OutboxError):
    """Kafka deleted records of the range while it was read; nothing was written: run it again."""


def read_records(settings: Settings, wanted: TopicRange, seconds: float = READ_SECONDS) -> list[Received]:
    """All records of `wanted`, each partition's in the order of their offsets.

    Args:
        settings: where Kafka is.
        wanted: what to read; Kafka must have all of it.
        seconds: how long it may take at most.

    Raises:
        RecordsVanished: Kafka has deleted some of them since the caller asked where the topic begins.
        LogUnavailable: Kafka does not answer, or it takes longer than `seconds`.
        ServerRefused: we may not read.
    """
    return list(_records(settings, wanted, seconds))


def first_record(settings: Settings, wanted: TopicRange, seconds: float = READ_SECONDS) -> Received | None:
    """One of the records of a range, or None if it has none.

    Args:
        settings: name Kafka.
        wanted: the range; Kafka must have all of it.
        seconds: how long it may take at most.

    Raises:
        RecordsVanished: Kafka has deleted some of them since the caller asked where the topic begins.
        LogUnavailable: Kafka does not answer, or it takes longer than `seconds`.
        ServerRefused: we may not read.
    """
    with closing(_records(settings, wanted, seconds)) as records:
        return next(records, None)


def _records(settings: Settings, wanted: TopicRange, seconds: float) -> Generator[Received]:
    unread = {partition for partition, first in wanted.begin.items() if first < wanted.end[partition]}
    if not unread:
        return
    deadline = time.monotonic() + seconds
    config = client_config(
        settings,
        group_id=f"{settings.group}-ranges",  # The client requires a group; nothing is committed to it.
        enable_auto_commit=False,
        isolation_level="read_committed",
    )
    # This function depends on these, so OUTBOX_KAFKA must not change them.
    config |= {"enable.partition.eof": True, "auto.offset.reset": "error"}
    try:
        with closing(Consumer(config)) as consumer:
            consumer.assign([TopicPartition(wanted.topic, each, wanted.begin[each]) for each in unread])
            while unread:
                if time.monotonic() > deadline:
                    raise LogUnavailable(f"{wanted.name}: the range was not read within {seconds:.0f} s")
                for message in consumer.consume(_BATCH, 0.1):
                    if _ends(message, wanted) and message.partition() in unread:
                        unread.discard(message.partition() or 0)
                        consumer.incremental_unassign([TopicPartition(wanted.topic, message.partition() or 0)])
                    if message.error() is None and (message.offset() or 0) < wanted.end[message.partition() or 0]:
                        yield _received(message, wanted.topic_id)
    except KafkaException as error:
        raise connection_error(error.args[0], settings) from error


def _ends(message: Message, wanted: TopicRange) -> bool:
    """Whether `message` is the last of the range in its partition. Raises the error that it reports, if any."""
    error = message.error()
    partition, offset = message.partition() or 0, message.offset() or 0
    if error is None:
        return offset >= wanted.end[partition] - 1
    if error.code() == KafkaError._PARTITION_EOF:
        return offset >= wanted.end[partition]
    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise RecordsVanished(f"{wanted.name}: Kafka deleted records while they were read: run it again")
    if not error.retriable():
        raise KafkaException(error)
    return False


def _received(message: Message, topic_id: str) -> Received:
    topic, partition, offset = message.topic() or "", message.partition() or 0, message.offset() or 0
    found = readable_headers(message)
    if found is None:
        logger.warning("%s/%d/%d: a header's name is not UTF-8: the record has no headers", topic, partition, offset)
    headers = tuple((name, _bytes(value)) for name, value in found or ())
    return Received(
        topic,
        partition,
        offset,
        message.timestamp()[1],
        _bytes(message.key()),
        _bytes(message.value()),
        headers,
        event_identity(headers, f"{topic_id}/{partition}/{offset}").key,
        unreadable_headers=found is None,
    )


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
