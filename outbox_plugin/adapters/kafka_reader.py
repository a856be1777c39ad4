"""Reads a topic's partitions from given offsets to given ends, with a deadline.

A record's offset says little about where a partition ends: compaction leaves gaps, and the marks that end transactions
take offsets too. So a partition has been read once a record at or behind its last offset has come, or once the broker
reports the end of the partition at or behind the end that was asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox_plugin.adapters.kafka_clients import (
    NO_LEADER_YET,
    REQUEST_TIMEOUT_SECONDS,
    UNKNOWN_TOPIC,
    internal_client_config,
)
from outbox_plugin.adapters.topic_metadata import NO_ANSWER, attempt_seconds
from outbox_plugin.adapters.truncation_aware_reader import TruncationAwareReader
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings

_WAIT_SECONDS = 0.1
_LEADERS_SECONDS = 0.5  # How long a new consumer waits for Kafka's list of leaders.


class NotReadToEnd(LogUnavailable):
    """Kafka did not deliver all records in time."""


@dataclass(frozen=True, slots=True)
class OffsetSpan:
    """The part of a partition that is read.

    Args:
        start: the first offset.
        end: the offset behind the last one.
        least_end: the broker's report that the partition ends here, or later, is enough. None is `end`. A consumer that
            reads committed records alone meets such a report where an open transaction begins.
    """

    start: int
    end: int
    least_end: int | None = None


class PartitionReader:
    """Reads one span of each partition of a topic, once."""

    def __init__(self, consumer: Consumer, topic: str, spans: Mapping[int, OffsetSpan]) -> None:
        """Assign the partitions; an empty span counts as read.

        Args:
            consumer: has `enable.partition.eof`, as `reader_config` sets it. Nobody else may use it meanwhile.
            topic: its name.
            spans: what to read, by partition.
        """
        self._topic = topic
        self._spans = spans
        self._unread = {partition: span.start for partition, span in spans.items() if span.start < span.end}
        self._reading = TruncationAwareReader(consumer, topic, self._unread)
        consumer.assign([TopicPartition(topic, partition, start) for partition, start in self._unread.items()])

    @property
    def offsets_passed(self) -> int:
        """How many offsets of all spans have been read, or were found to hold no record."""
        at = {partition: span.end for partition, span in self._spans.items()} | self._unread
        return sum(at[partition] - span.start for partition, span in self._spans.items() if span.start < span.end)

    @property
    def unread(self) -> tuple[int, ...]:
        """The partitions whose spans have not been read to their ends."""
        return tuple(self._unread)

    def batches(
        self, *, deadline: float = math.inf, silence_seconds: float = math.inf, max_records: int = 1
    ) -> Iterator[list[Message]]:
        """The records of all spans, each partition's in the order of their offsets. A batch may be empty.

        Args:
            deadline: of `time.monotonic()`, in seconds, by which all must have been read.
            silence_seconds: how long Kafka may deliver nothing. Only the time in which this polls counts: not that in
                which the process is stopped, has no CPU, or works on a batch.
            max_records: of a batch. With 1 a record is yielded as soon as it arrives, with more after 0.1 seconds at
                the latest.

        Raises:
            NotReadToEnd: Kafka has not delivered all by the deadline, or was silent for too long.
            TruncatedWhileRead: a partition was truncated, and records that were delivered are gone.
            KafkaException: an error that does not pass by itself.
        """
        silent_seconds = 0.0
        while self._unread:
            polled_at = time.monotonic()
            if silent_seconds > silence_seconds or polled_at > deadline:
                raise NotReadToEnd(f"Kafka: {self._topic} was not read to its end")
            before = dict(self._unread)
            batch = [
                message
                for message in self._reading.consume(max_records, _WAIT_SECONDS)
                if self._is_in_span(message.partition() or 0, message.offset() or 0, message.error())
            ]
            # A poll that lasts longer than it waits is one in which the process was stopped, or had no CPU.
            silent_seconds += min(time.monotonic() - polled_at, _WAIT_SECONDS)
            if self._unread != before:
                silent_seconds = 0.0
            yield batch

    def _is_in_span(self, partition: int, offset: int, error: KafkaError | None) -> bool:
        """Update the progress for a message. Returns whether it is a record of a span."""
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            if error.fatal() or not error.retriable():
                raise KafkaException(error)
            return False
        if partition not in self._unread:
            return False
        span = self._spans[partition]
        if error is not None:
            if offset >= (span.end if span.least_end is None else span.least_end):
                self._end(partition)
            return False
        self._unread[partition] = offset + 1
        if offset + 1 >= span.end:
            self._end(partition)
        return offset < span.end

    def _end(self, partition: int) -> None:
        del self._unread[partition]
        self._reading.end(partition)


def reader_config(settings: Settings, group_id: str, **required: Any) -> dict[str, Any]:
    """The configuration of a consumer that reads topics of our own, and whose records are few and awaited.

    Args:
        settings: how to reach Kafka.
        group_id: the client requires one. It joins no group and commits no offset.
        required: further properties, dots written as underscores, that no setting may change.
    """
    return internal_client_config(
        settings,
        **{
            "group_id": group_id,
            "enable_auto_commit": False,
            "enable_partition_eof": True,
            "auto_offset_reset": "earliest",
            "fetch_wait_max_ms": 20,
            "fetch_min_bytes": 1,
            **required,
        },
    )


def find_leaders(consumer: Consumer, topic: str) -> None:
    """Let a new consumer learn which brokers lead the topic's partitions, before it asks for offsets or records.

    A new client closes its first connection once it knows the brokers. librdkafka repeats a request that was sent over
    it only after 0.7 seconds, and looks again for a leader that it does not know yet only after 0.5 seconds.

    If Kafka does not answer, this raises nothing: the consumer's next request does.
    """
    with suppress(KafkaException):
        consumer.list_topics(topic, timeout=_LEADERS_SECONDS)


def ends(consumer: Consumer, topic: str, partitions: Iterable[int]) -> list[TopicPartition]:
    """The end of each partition, for a new consumer that is to read all that is written after this call.

    A consumer that is assigned `OFFSET_END` asks for the end later, and skips what was written meanwhile. A partition
    that has no leader yet, as right after its creation, is asked for again. Where Kafka does not answer in time, the
    ends are `OFFSET_END` after all.

    Args:
        consumer: a new one.
        topic: its name.
        partitions: their numbers.
    """
    at_the_end = [TopicPartition(topic, partition, OFFSET_END) for partition in partitions]
    find_leaders(consumer, topic)
    deadline = time.monotonic() + _LEADERS_SECONDS
    while (left_seconds := deadline - time.monotonic()) > 0:
        with suppress(KafkaException):
            return _offsets(consumer, at_the_end, left_seconds)
        time.sleep(0.02)
    return at_the_end


def beginnings(consumer: Consumer, partitions: Sequence[TopicPartition], timeout_seconds: float) -> list[int]:
    """The first offset of each partition that Kafka keeps.

    Args:
        consumer: any.
        partitions: their offsets are ignored.
        timeout_seconds: how long that may take.

    Raises:
        KafkaException: Kafka does not return all of them in time.
    """
    asked = [TopicPartition(each.topic, each.partition, OFFSET_BEGINNING) for each in partitions]
    return [each.offset for each in _offsets(consumer, asked, timeout_seconds)]


def _offsets(consumer: Consumer, asked: list[TopicPartition], timeout_seconds: float) -> list[TopicPartition]:
    """What `OFFSET_END` or `OFFSET_BEGINNING` stands for in each partition. These numbers mean the same as times.

    Raises:
        KafkaException: Kafka does not return all of them in time.
    """
    found = consumer.offsets_for_times(asked, timeout=timeout_seconds)
    for each in found:
        if each.error is not None or each.offset < 0:
            raise KafkaException(each.error or KafkaError(KafkaError._NO_OFFSET))
    return found


def bounds(
    consumer: Consumer,
    partition: TopicPartition,
    timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    should_wait: Callable[[], bool] = lambda: True,
) -> tuple[int, int]:
    """The partition's first offset and its end; waits while it has no leader yet, as right after its creation.

    Args:
        consumer: its isolation level says whether an open transaction is the end.
        partition: its offset is ignored.
        timeout_seconds: how long that may take.
        should_wait: returns whether waiting still makes sense; called now and then.

    Raises:
        KafkaException: Kafka does not answer in time, or refuses to.
    """
    began = time.monotonic()
    deadline = began + timeout_seconds
    while True:
        try:
            first, end = consumer.get_watermark_offsets(partition, timeout=attempt_seconds(began, deadline))
            return first, end
        except KafkaException as error:
            passes = error.args[0].code() in {*UNKNOWN_TOPIC, *NO_LEADER_YET, *NO_ANSWER}
            if not passes or time.monotonic() >= deadline or not should_wait():
                raise
            time.sleep(0.05)
