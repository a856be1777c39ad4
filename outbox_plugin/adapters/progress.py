"""The progress topic, as a new leader reads it."""

from __future__ import annotations

import time
from contextlib import closing

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka import REQUEST_TIMEOUT_SECONDS, UNKNOWN_TOPIC, Names, bounds, client_config, refusal
from outbox_plugin.core.progress import ProgressRecord
from outbox_plugin.core.shards import Slice
from outbox_plugin.errors import LogUnavailable, TopicMissing
from outbox_plugin.settings import Settings

_POLL_SECONDS = 0.5
_TAIL_RECORDS = 32  # How far from its end the progress topic is read at first; markers take offsets too.


def read_progress(
    settings: Settings, names: Names, slice_: Slice, *, to_the_end: bool = False
) -> ProgressRecord | None:
    """The slice's last committed progress record; None if there is none. Fences nobody.

    Args:
        settings: which Kafka.
        names: what the group calls its topics.
        slice_: whose record.
        to_the_end: read all that was there when the read began. Otherwise the read ends where an open transaction
            begins, or where a replica that lags has nothing more, and a later record may be left out.

    Raises:
        TopicMissing: the brokers do not know the topic.
        LogUnavailable: Kafka does not answer in time, or does not give all of it.
        ServerRefused: we may not read the topic.
        MalformedProgress: what is there is no progress record.
    """
    partition = TopicPartition(names.progress_topic, slice_.number)
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
        with closing(Consumer({**config, "isolation.level": "read_uncommitted"})) as uncommitted:
            first, end = bounds(uncommitted, partition)  # To one who reads committed, an open transaction is the end.
        with closing(Consumer(config)) as consumer:
            reach = _TAIL_RECORDS
            while True:
                start = max(first, end - reach)
                body = _last_value(
                    consumer,
                    TopicPartition(partition.topic, partition.partition, start),
                    slice_.name,
                    end if to_the_end else start,
                )
                if body is not None:
                    return ProgressRecord.parse(body)
                if start <= first:
                    return None
                reach *= 8
    except KafkaException as error:
        if error.args[0].code() in UNKNOWN_TOPIC:
            raise TopicMissing(f"Kafka: the topic {names.progress_topic} is gone") from error
        raise refusal(error.args[0], settings) from error


def _last_value(consumer: Consumer, start: TopicPartition, key: str, end: int) -> bytes | None:
    """The value of the last committed record of `key` from `start` to `end` at least; None if there is none."""
    consumer.assign([start])
    last: bytes | None = None
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        message = consumer.poll(_POLL_SECONDS)
        if message is None:
            continue
        if (error := message.error()) is None:
            if message.key() == key.encode():
                last = message.value()
        elif error.code() == KafkaError._PARTITION_EOF:
            if (message.offset() or 0) >= end:
                return last
        elif error.fatal() or not error.retriable():
            raise KafkaException(error)
    raise LogUnavailable(
        f"Kafka: {start.topic} was not read to its end within {REQUEST_TIMEOUT_SECONDS:.0f} s; an open transaction of "
        "another producer there holds it up"
    )
