"""A partition that is cut while it is read: what librdkafka has dropped is read again, or the reading fails."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from outbox_plugin.adapters.truncation_aware_reader import TruncatedWhileRead, TruncationAwareReader

NO_EPOCH = -1  # Of a record whose epoch Kafka does not tell.


class Message:
    """A record, or that the partition has been read to its end."""

    def __init__(self, offset: int, epoch: int | None) -> None:
        self._offset, self._epoch = offset, epoch

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def leader_epoch(self) -> int | None:
        return None if self._epoch == NO_EPOCH else self._epoch

    def error(self) -> KafkaError | None:
        return KafkaError(KafkaError._PARTITION_EOF) if self._epoch is None else None


class Client:
    """A consumer of a log, which is the epoch of each of its records; None stands for a transaction marker."""

    def __init__(self, *log: int | None) -> None:
        self.log = list(log)
        self.seeks = 0
        self._at, self._end_told = 0, -1

    def cut(self, end: int, *more: int | None) -> None:
        """Cut the log, and go on there: what was fetched is dropped."""
        self.log[end:] = more
        self._at = end

    def seek(self, partition: TopicPartition) -> None:
        self.seeks += 1
        self._at, self._end_told = partition.offset, -1

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        return 0, len(self.log)

    def consume(self, most: int, seconds: float) -> list[Message]:
        polled: list[Message] = []
        while len(polled) < most and self._at < len(self.log):
            if (epoch := self.log[self._at]) is not None:
                polled.append(Message(self._at, epoch))
            self._at += 1
        if len(polled) < most and self._end_told != self._at:
            self._end_told = self._at
            polled.append(Message(self._at, None))
        return polled


def reading_of(client: Any) -> TruncationAwareReader:
    return TruncationAwareReader(client, "t", {0: 0})


def read(reading: TruncationAwareReader, most: int, times: int = 1) -> list[int]:
    """The offsets of the records of so many polls."""
    return [each.offset() or 0 for _ in range(times) for each in reading.consume(most, 0.0) if each.error() is None]


@pytest.mark.parametrize("more", [(), (1,), (1, 1, 2)], ids=["nothing follows", "one follows", "more follow"])
@pytest.mark.parametrize("most", [1, 100])
def test_what_was_dropped_is_read(more: tuple[int, ...], most: int) -> None:
    client = Client(*[0] * 10)
    reading = reading_of(client)
    assert read(reading, 1, 3) == [0, 1, 2]
    client.cut(7, *more)
    assert read(reading, most, 30) == [*range(3, 7 + len(more))]


def test_what_was_dropped_before_the_first_poll_is_read() -> None:
    client = Client(*[0] * 10)
    reading = reading_of(client)
    client.cut(7, 1, 1)
    assert read(reading, 100, 4) == [*range(9)]


@pytest.mark.parametrize("most", [1, 100])
def test_records_that_were_read_and_are_gone_are_noticed_where_others_follow(most: int) -> None:
    client = Client(0, 0, 0)
    reading = reading_of(client)
    read(reading, 3)
    client.log[:] = [0, 1, 1, 1, 1]  # The client has heard of no cut.
    with pytest.raises(TruncatedWhileRead, match="the partition 0 of t was cut"):
        read(reading, most, 10)


def test_or_where_the_client_goes_back() -> None:
    client = Client(0, 0, 0)
    reading = reading_of(client)
    read(reading, 3)
    client.cut(1, 1)
    with pytest.raises(TruncatedWhileRead):
        read(reading, 1)


@pytest.mark.parametrize("most", [1, 100])
def test_or_where_a_marker_stands_in_the_place_of_the_last_record(most: int) -> None:
    client = Client(0, 0, 0)
    reading = reading_of(client)
    read(reading, 3)
    client.log[2:] = [None, None, None]
    with pytest.raises(TruncatedWhileRead):
        read(reading, most, 10)


def test_a_log_without_epochs_is_read_once() -> None:
    client = Client(NO_EPOCH, NO_EPOCH, None, None)
    assert read(reading_of(client), 100, 5) == [0, 1]
    assert client.seeks == 1


def test_a_new_leader_without_a_cut_costs_a_seek() -> None:
    client = Client(0, 0, None, None, 1, 1, None, 2)
    assert read(reading_of(client), 100, 5) == [0, 1, 4, 5, 7]
    assert client.seeks == 2


def test_markers_at_the_end_cost_a_seek() -> None:
    client = Client(0, 0, None, None)
    assert read(reading_of(client), 100, 5) == [0, 1]
    assert client.seeks == 1


def test_markers_alone_cost_a_seek() -> None:
    client = Client(None, None)
    assert read(reading_of(client), 100, 5) == []
    assert client.seeks == 1


@pytest.mark.parametrize("most", [1, 100])
def test_what_was_dropped_is_read_where_the_end_has_risen_and_fallen_between_two_polls(most: int) -> None:
    client = Client(0, 0, 0)
    reading = reading_of(client)
    assert read(reading, most, 5) == [0, 1, 2]
    client.log += [0] * 7
    client.cut(7)
    assert read(reading, most, 30) == [3, 4, 5, 6]


def test_of_a_partition_that_has_ended_no_more_comes() -> None:
    client = Client(0, 0, 1)
    reading = reading_of(client)
    first = reading.consume(100, 0.0)
    assert next(first).offset() == 0
    reading.end(0)
    assert [*first, *reading.consume(100, 0.0)] == []
    assert client.seeks == 0
