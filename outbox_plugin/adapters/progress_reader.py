"""The progress topic, as a new leader reads it."""

from __future__ import annotations

import time
from contextlib import closing

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka_clients import (
    REQUEST_TIMEOUT_SECONDS,
    UNKNOWN_TOPIC,
    bounds,
    content,
    own_config,
    refusal,
)
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.core.last_progress import LastProgress, LogRecord, Reader
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Signer, Slot
from outbox_plugin.errors import LogUnavailable, TopicMissing
from outbox_plugin.settings import Settings

_POLL_SECONDS = 0.5
_TAIL_RECORDS = 32  # How far from its end the progress topic is read at first; markers take offsets too.


def read_progress(
    settings: Settings,
    names: KafkaNames,
    slice_: Slice,
    signer: Signer,
    *,
    to_the_end: bool = False,
    accepts_unsigned: bool = False,
) -> LastProgress:
    """What the progress topic says of a slice. Fences nobody.

    Args:
        settings: which Kafka.
        names: what the group calls its topics.
        slice_: whose record.
        signer: has the secret of the outbox.
        to_the_end: read all that was there when the read began. Otherwise the read ends where an open transaction
            begins, or where a replica that lags has nothing more, and a later record may be taken for uncommitted.
        accepts_unsigned: the slice's last leader may have been of a version that did not sign.

    Raises:
        TopicMissing: the brokers do not know the topic.
        LogUnavailable: Kafka does not answer in time, or does not give all of it.
        ServerRefused: we may not read the topic.
        MalformedProgress: a harvester of a later version has written what is there.
    """
    slot = Slot("progress", names.progress_topic, slice_.number)
    reader = Reader(signer, slot, slice_.name.encode(), accepts_unsigned)
    partition = TopicPartition(names.progress_topic, slice_.number)
    config = own_config(
        settings,
        group_id=names.leader_group,  # Required by the client; nothing is committed to it.
        enable_auto_commit=False,
        enable_partition_eof=True,
        auto_offset_reset="earliest",
        fetch_wait_max_ms=20,
        fetch_min_bytes=1,
    )
    try:
        with (
            closing(Consumer({**config, "isolation.level": "read_uncommitted"})) as uncommitted,
            closing(Consumer({**config, "isolation.level": "read_committed"})) as committed,
        ):
            first, end = bounds(uncommitted, partition)  # To one who reads committed, an open transaction is the end.
            reach = _TAIL_RECORDS
            while True:
                start = max(first, end - reach)
                place = TopicPartition(partition.topic, partition.partition, start)
                kept = {
                    each.offset for each in _records(committed, place, reader.key, end, end if to_the_end else start)
                }
                seen = _records(uncommitted, place, reader.key, end, end)
                found = reader.conclude(
                    [each._replace(is_committed=each.offset in kept) for each in seen], start, first, end
                )
                if found is not None:
                    return found
                reach *= 8
    except KafkaException as error:
        if error.args[0].code() in UNKNOWN_TOPIC:
            raise TopicMissing(f"Kafka: the topic {names.progress_topic} is gone") from error
        raise refusal(error.args[0], settings) from error


def _records(consumer: Consumer, start: TopicPartition, key: bytes, end: int, least: int) -> list[LogRecord]:
    """The records of `key` that the consumer sees from `start` to `end`; fewer if it sees no more, from `least` on."""
    consumer.assign([start])
    found: list[LogRecord] = []
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while start.offset < end and time.monotonic() < deadline:
        message = consumer.poll(_POLL_SECONDS)
        if message is None:
            continue
        offset = message.offset() or 0
        if (error := message.error()) is None:
            deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS  # Much may be left to read, as where a slice is new.
            its_key, value, headers = content(message)
            if its_key == key and offset < end:
                found.append(LogRecord(offset, False, value, headers))
            if offset >= end - 1:
                return found
        elif error.code() == KafkaError._PARTITION_EOF:
            if offset >= least:
                return found
        elif error.fatal() or not error.retriable():
            raise KafkaException(error)
    if start.offset >= end:
        return found
    raise LogUnavailable(
        f"Kafka: {start.topic} was not read to its end: nothing more came for {REQUEST_TIMEOUT_SECONDS:.0f} s; an open "
        "transaction of another producer there holds it up"
    )
