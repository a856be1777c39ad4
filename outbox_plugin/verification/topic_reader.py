"""Reads topics record by record in this process, and passes each record to a `Verifier`.

It reads what a `read_committed` consumer sees. It needs about 90 bytes of memory for each record, and 120 for each key
of a job: 0.5 to 1 GB for `MAX_RECORDS`. `on_spark` verifies larger topics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka_clients import client_config, connection_error, readable_headers
from outbox_plugin.adapters.kafka_reader import PartitionReader
from outbox_plugin.settings import Settings
from outbox_plugin.verification.emitted_counts import emitted_counts
from outbox_plugin.verification.topic_ends import committed_spans
from outbox_plugin.verification.verdict import TopicVerdict
from outbox_plugin.verification.verifier import Verifier

MAX_RECORDS = 5_000_000
SILENCE_SECONDS = 60.0
_BATCH = 1_000
_QUEUED_KILOBYTES = 16_384  # How much the client fetches ahead; librdkafka's default is 64 MB.

Advance = Callable[[int], None]  # Called with the number of offsets read since the last call.


def verify_topic(
    settings: Settings, topic: str, *, job: str | None = None, timeout_seconds: float = 300.0
) -> TopicVerdict:
    """Read `topic` from its beginning to its present end, and verify it.

    Args:
        settings: name Kafka.
        topic: its name.
        job: verify only the records of this job, or of this streaming query.
        timeout_seconds: how long the reading may take.

    Raises:
        LogUnavailable: Kafka does not answer, or the end was not reached within `timeout_seconds`.
        ServerRefused: there is no such topic, or we may not read it.
    """
    verifier = Verifier(job)
    _read(settings, topic, verifier, lambda _: None, deadline=time.monotonic() + timeout_seconds)
    return verifier.verdict


def verify_topics(
    settings: Settings, topics: Sequence[str], *, job: str | None = None, advance: Advance = lambda _: None
) -> TopicVerdict:
    """Read `topics` from their beginning to their present end, and verify them, as `outbox_plugin.spark.verify` does.

    Args:
        settings: name Kafka, and the database that knows how many events a job emitted.
        topics: all topics that the jobs emitted to. Events in other topics count as missing.
        job: verify only the records of this job, or of this streaming query.
        advance: called after each batch with the number of offsets read.

    Raises:
        LogUnavailable: Kafka does not answer, or sends nothing for a minute.
        ServerRefused: there is no such topic, or we may not read it; or Postgres cannot be reached, or refuses.
    """
    verifier = Verifier(job)
    for topic in dict.fromkeys(topics):
        _read(settings, topic, verifier, advance, silence_seconds=SILENCE_SECONDS)
    if jobs := verifier.jobs:
        verifier.count_missing(emitted_counts(settings, jobs))
    return verifier.verdict


def _read(
    settings: Settings,
    topic: str,
    verifier: Verifier,
    advance: Advance,
    *,
    deadline: float = math.inf,
    silence_seconds: float = math.inf,
) -> None:
    """Pass the records of `topic` to `verifier`, up to the present ends of its partitions.

    Args:
        settings: name Kafka.
        topic: its name.
        verifier: verifies the records.
        advance: called after each batch with the number of offsets read.
        deadline: in seconds of `time.monotonic()`, when all must have been read.
        silence_seconds: how long Kafka may send nothing.
    """
    config = client_config(
        settings,
        group_id=f"{settings.group}-verification",  # The client requires one; no offsets are committed.
        enable_auto_commit=False,
        isolation_level="read_committed",
        queued_max_messages_kbytes=_QUEUED_KILOBYTES,
    )
    # Added last, so that no setting can make it skip records, or hide the end of a partition.
    config |= {"auto.offset.reset": "earliest", "enable.partition.eof": True}
    try:
        with closing(Consumer(config)) as consumer:
            reader = PartitionReader(consumer, topic, committed_spans(settings, topic))
            passed = 0
            for batch in reader.batches(deadline=deadline, silence_seconds=silence_seconds, max_records=_BATCH):
                for message in batch:
                    partition, key = message.partition() or 0, message.key() or b""
                    verifier.judge(
                        f"{topic}/{partition} offset {message.offset()}",
                        key if isinstance(key, bytes) else key.encode(),
                        readable_headers(message) or [],
                        (topic, partition),
                    )
                passed_before, passed = passed, reader.offsets_passed
                advance(passed - passed_before)
    except KafkaException as error:
        raise connection_error(error.args[0], settings) from error


def records_in(settings: Settings, topics: Iterable[str]) -> int:
    """How many records `topics` have at most, according to their offsets.

    Raises:
        LogUnavailable: Kafka does not answer.
        ServerRefused: there is no such topic, or we may not read it.
    """
    config = client_config(settings, group_id=f"{settings.group}-verification")
    try:
        with closing(Consumer(config)) as consumer:
            spans = [
                consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
                for topic in dict.fromkeys(topics)
                for partition in consumer.list_topics(topic, timeout=10).topics[topic].partitions
            ]
    except KafkaException as error:
        raise connection_error(error.args[0], settings) from error
    return sum(last - first for first, last in filter(None, spans))
