"""A topic is read to the ends that were asked for, over gaps and errors that pass; or it is said that it was not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from outbox_plugin import Settings
from outbox_plugin.adapters import kafka_reader, topic_metadata
from outbox_plugin.adapters.kafka_reader import (
    NotReadToEnd,
    OffsetSpan,
    PartitionReader,
    bounds,
    ends,
    reader_config,
)
from tests.clock import SimulatedTime

END = KafkaError(KafkaError._PARTITION_EOF)
PASSES = KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION, retriable=True)
FORBIDDEN = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
CLOCK = SimulatedTime()
SILENCE_SECONDS = 5.0


@pytest.fixture(autouse=True)
def _time_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kafka_reader, topic_metadata):
        monkeypatch.setattr(module, "time", CLOCK)


class Message:
    """A record, or what the client reports of a partition."""

    def __init__(self, partition: int, offset: int, error: KafkaError | None = None, epoch: int | None = None) -> None:
        self._partition, self._offset, self._error, self._epoch = partition, offset, error, epoch

    def topic(self) -> str:
        return "t"

    def leader_epoch(self) -> int | None:
        return self._epoch

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def error(self) -> KafkaError | None:
        return self._error


class Client:
    """Delivers `messages`, and then nothing. After a seek, it delivers those again that are still there.

    The process is stopped during the first `stops` polls, for longer than Kafka may be silent. Any other poll takes a
    millisecond, or, where it delivers nothing, as long as it may.
    """

    def __init__(self, messages: Sequence[Message], stops: int = 0) -> None:
        self._messages = list(messages)
        self._stops = stops
        self._delivered: list[Message] = []
        self.assigned: list[TopicPartition] = []

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned = partitions

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        return 0, 100

    def consume(self, most: int, seconds: float) -> list[Message]:
        if self._stops:
            self._stops -= 1
            CLOCK.sleep(2 * SILENCE_SECONDS)
            return []
        CLOCK.sleep(0.001 if self._messages else seconds)
        delivered, self._messages = self._messages[:most], self._messages[most:]
        self._delivered += delivered
        return delivered

    def seek(self, to: TopicPartition) -> None:
        there = [each for each in self._delivered if each.partition() == to.partition and each.offset() >= to.offset]
        self._messages = [each for each in there if each.error() is None] + there[-1:] + self._messages


def reader(spans: dict[int, OffsetSpan], *messages: Message, stops: int = 0) -> PartitionReader:
    client: Any = Client(messages, stops)
    made = PartitionReader(client, "t", spans)
    assert [(each.partition, each.offset) for each in client.assigned] == [
        (partition, span.start) for partition, span in spans.items() if span.start < span.end
    ]
    return made


def offsets(reader: PartitionReader, max_records: int = 1) -> list[tuple[int | None, int | None]]:
    """What is read before Kafka has been silent for too long."""
    batches = reader.batches(silence_seconds=SILENCE_SECONDS, max_records=max_records)
    return [(message.partition(), message.offset()) for message in chain.from_iterable(batches)]


@pytest.mark.parametrize("max_records", [1, 3, 100])
def test_each_partition_is_read_to_its_own_end(max_records: int) -> None:
    spans = {0: OffsetSpan(5, 8), 1: OffsetSpan(0, 2), 2: OffsetSpan(3, 3)}
    arrived = [(0, 5), (1, 0), (0, 6), (1, 1), (1, 2), (0, 7)]
    read = reader(spans, *(Message(*each) for each in arrived))
    assert offsets(read, max_records) == [each for each in arrived if each != (1, 2)]
    assert read.offsets_passed == 5


def test_a_record_behind_a_gap_ends_a_partition_and_is_not_of_it() -> None:
    assert offsets(reader({0: OffsetSpan(0, 5)}, Message(0, 1), Message(0, 9))) == [(0, 1)]


def test_the_reported_end_counts_from_the_end_that_was_asked_for() -> None:
    read = reader({0: OffsetSpan(0, 5)}, Message(0, 0), Message(0, 3, END))
    with pytest.raises(NotReadToEnd, match="t was not read to its end"):
        offsets(read)
    assert read.offsets_passed == 1
    assert offsets(reader({0: OffsetSpan(0, 5)}, Message(0, 0), Message(0, 3, END), Message(0, 5, END))) == [(0, 0)]


def test_an_earlier_reported_end_may_be_enough() -> None:
    assert offsets(reader({0: OffsetSpan(2, 5, least_end=2)}, Message(0, 2, END))) == []


def test_an_error_that_passes_is_waited_out_and_another_is_raised() -> None:
    assert offsets(reader({0: OffsetSpan(0, 1)}, Message(0, 0, PASSES), Message(0, 0))) == [(0, 0)]
    with pytest.raises(KafkaException):
        offsets(reader({0: OffsetSpan(0, 1)}, Message(0, 0, FORBIDDEN), Message(0, 0)))


def test_a_deadline_ends_a_read_that_is_never_silent() -> None:
    read = reader({0: OffsetSpan(0, 10**9)}, *(Message(0, offset) for offset in range(100_000)))
    with pytest.raises(NotReadToEnd):
        for _ in read.batches(deadline=CLOCK.monotonic() + 0.05, silence_seconds=60.0):
            pass
    assert 0 < read.offsets_passed < 100_000


def test_silence_of_kafka_is_waited_for_no_longer_than_asked() -> None:
    read = reader({0: OffsetSpan(0, 3)}, Message(0, 0))
    began = CLOCK.monotonic()
    with pytest.raises(NotReadToEnd):
        offsets(read)
    assert SILENCE_SECONDS < CLOCK.monotonic() - began < SILENCE_SECONDS + 0.3


def test_a_stop_of_our_own_process_is_no_silence_of_kafka() -> None:
    """Whether it stops, or has no CPU, while it polls, or while a batch is worked on."""
    read = reader({0: OffsetSpan(0, 3)}, *(Message(0, offset) for offset in range(3)), stops=2)
    for _ in read.batches(silence_seconds=SILENCE_SECONDS):
        CLOCK.sleep(2 * SILENCE_SECONDS)
    assert read.unread == ()


def test_no_setting_changes_how_our_own_topics_are_read() -> None:
    theirs = {"auto.offset.reset": "latest", "enable.partition.eof": "false", "fetch.min.bytes": "9"}
    config = reader_config(Settings(dsn="postgresql://x", bootstrap_servers="k:1", kafka=theirs), "g")
    assert (config["auto.offset.reset"], config["enable.partition.eof"], config["fetch.min.bytes"]) == (
        "earliest",
        True,
        1,
    )


@pytest.mark.parametrize(
    "answer",
    [
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
    ],
)
def test_bounds_are_asked_again_while_the_brokers_do_not_agree_on_a_leader(answer: int) -> None:
    errors = [KafkaException(KafkaError(answer))]

    class Consumer:
        def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
            if errors:
                raise errors.pop()
            return 3, 9

    client: Any = Consumer()
    assert bounds(client, TopicPartition("t", 0)) == (3, 9)


@pytest.mark.parametrize("should_wait", [True, False])
def test_bounds_are_asked_for_once_more_only_where_somebody_waits(*, should_wait: bool) -> None:
    """Kafka does not answer, and the term may have to end."""
    asked: list[float] = []

    class Consumer:
        def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
            asked.append(timeout)
            if len(asked) == 1:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return 3, 9

    client: Any = Consumer()
    with nullcontext() if should_wait else pytest.raises(KafkaException):
        bounds(client, TopicPartition("t", 0), should_wait=lambda: should_wait)
    assert len(asked) == 1 + should_wait
    assert max(asked) < 5.0


def test_ends_are_asked_again_while_a_partition_has_no_leader() -> None:
    asked: list[Any] = []

    class Consumer:
        def list_topics(self, topic: str, timeout: float) -> None:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

        def offsets_for_times(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
            asked.append([(each.topic, each.partition, each.offset) for each in partitions])
            if len(asked) == 1:
                raise KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
            return [TopicPartition(each.topic, each.partition, 7 + each.partition) for each in partitions]

    client: Any = Consumer()
    assert [each.offset for each in ends(client, "t", range(2))] == [7, 8]
    assert asked == 2 * [[("t", 0, OFFSET_END), ("t", 1, OFFSET_END)]]


def test_a_reader_may_start_at_the_ends_though_kafka_does_not_name_them() -> None:
    class Consumer:
        def list_topics(self, topic: str, timeout: float) -> None: ...

        def offsets_for_times(self, partitions: list[TopicPartition], timeout: float) -> None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    client: Any = Consumer()
    assert [each.offset for each in ends(client, "t", range(2))] == [OFFSET_END, OFFSET_END]
