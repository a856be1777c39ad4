"""What a topic proves about its events: how many there are, whether any came twice, whether any came out of order.

Judged as a `read_committed` consumer sees them, by the headers that the write side puts there: `idempotency-key` names
an event, `outbox-sequence` is its place within the job that `outbox-job` names (see `core.event_identity`). Records
without them are only counted.

This reads the records one by one, in this process, which remembers about 90 bytes of each, and 120 of each key of a
job. So `MOST_RECORDS` take half a gigabyte to one; Spark judges more (`spark.verify`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka_clients import client_config, readable_headers, refusal
from outbox_plugin.adapters.kafka_reader import bounds
from outbox_plugin.errors import LogUnavailable, ServerRefused
from outbox_plugin.settings import Settings
from outbox_plugin.verification.emitted_counts import emitted_counts
from outbox_plugin.verification.verdict import TopicVerdict
from outbox_plugin.verification.verifier import Verifier

MOST_RECORDS = 5_000_000
SILENCE_SECONDS = 60.0
_BATCH = 1_000
_QUEUED_KILOBYTES = 16_384  # Of records that are fetched ahead; librdkafka's own default is 64 MB.

Advance = Callable[[int], None]  # Told how many offsets have been passed since it was last called.


def verify_topic(
    settings: Settings, topic: str, *, job: str | None = None, timeout_seconds: float = 300.0
) -> TopicVerdict:
    """Read `topic` from its beginning to its present end, and judge it.

    Raises:
        LogUnavailable: Kafka does not answer, or the end was not reached within `timeout_seconds`.
        ServerRefused: there is no such topic, or we may not read it.
    """
    verifier = Verifier(job)
    deadline = time.monotonic() + timeout_seconds
    _read(settings, topic, verifier, lambda _: deadline, lambda _: None)
    return verifier.verdict


def verify_topics(
    settings: Settings, topics: Sequence[str], *, job: str | None = None, advance: Advance = lambda _: None
) -> TopicVerdict:
    """Read `topics` from their beginning to their present end, and judge them, as `outbox_plugin.spark.verify` does.

    Args:
        settings: where Kafka is, and the database that knows how many events a job emitted.
        topics: all that the jobs emitted to; what went elsewhere counts as missing.
        job: judge only this job's records, or this streaming query's.
        advance: is called, after each batch, with the number of offsets that were passed.

    Raises:
        LogUnavailable: Kafka does not answer, or falls silent for a minute.
        ServerRefused: there is no such topic, or we may not read it; or Postgres does not let us look.
    """
    verifier = Verifier(job)
    for topic in dict.fromkeys(topics):
        _read(settings, topic, verifier, lambda heard_at: heard_at + SILENCE_SECONDS, advance)
    if jobs := verifier.jobs:
        verifier.miss(emitted_counts(settings, jobs))
    return verifier.verdict


def _read(
    settings: Settings, topic: str, verifier: Verifier, deadline: Callable[[float], float], advance: Advance
) -> None:
    """Show `verifier` the records of `topic`, up to the ends that its partitions have now.

    `deadline` says, by when something was heard last, until when more is waited for; both of `time.monotonic()`.
    """
    config = client_config(
        settings,
        group_id=f"{settings.group}-verification",  # Required by the client; nothing is committed to it.
        enable_auto_commit=False,
        isolation_level="read_committed",
        queued_max_messages_kbytes=_QUEUED_KILOBYTES,
    )
    # Tuning must not let it pass over records, nor keep from it where a partition ends.
    config |= {"auto.offset.reset": "earliest", "enable.partition.eof": True}
    began = heard_at = time.monotonic()
    try:
        with closing(Consumer(config)) as consumer:
            found = consumer.list_topics(topic, timeout=10).topics[topic]
            if found.error is not None:
                raise ServerRefused(f"the topic {topic} cannot be read: {found.error.str()}")
            ends = {number: bounds(consumer, TopicPartition(topic, number)) for number in found.partitions}
            consumer.assign([TopicPartition(topic, number, first) for number, (first, _) in ends.items()])
            at = {number: first for number, (first, end) in ends.items() if first < end}  # Of those not read yet.
            while at:
                if time.monotonic() > deadline(heard_at):
                    seconds = time.monotonic() - began
                    raise LogUnavailable(f"{topic} was not read to its end within {seconds:.0f} s")
                passed = 0
                for message in consumer.consume(_BATCH, 0.2):
                    error, number, offset = message.error(), message.partition() or 0, message.offset() or 0
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        if not error.retriable():
                            raise KafkaException(error)
                        continue
                    end = ends[number][1]
                    if number not in at or (error is not None and offset < end):  # Written since; or a leader lags.
                        continue
                    heard_at = time.monotonic()
                    if error is None and offset < end:
                        key = message.key() or b""
                        where = f"{topic}/{number} offset {offset}"
                        headers = readable_headers(message) or []
                        verifier.see(where, key if isinstance(key, bytes) else key.encode(), headers, (topic, number))
                    reached = offset + 1 if error is None and offset + 1 < end else end
                    passed += reached - at[number]
                    at[number] = reached
                    if reached == end:
                        del at[number]
                advance(passed)
    except KafkaException as error:
        raise refusal(error.args[0], settings) from error


def records_in(settings: Settings, topics: Iterable[str]) -> int:
    """How many records `topics` hold at most, by their offsets.

    Raises:
        LogUnavailable, ServerRefused: Kafka does not answer, or does not let us look.
    """
    config = client_config(settings, group_id=f"{settings.group}-verification")
    try:
        with closing(Consumer(config)) as consumer:
            bounds = [
                consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
                for topic in dict.fromkeys(topics)
                for partition in consumer.list_topics(topic, timeout=10).topics[topic].partitions
            ]
    except KafkaException as error:
        raise refusal(error.args[0], settings) from error
    return sum(last - first for first, last in filter(None, bounds))
