"""A partition that is cut while it is read: what librdkafka has dropped is read again, or the reading fails."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaError, TopicPartition

from outbox_plugin.adapters.truncation_aware_reader import TruncatedWhileRead, TruncationAwareReader

NO_EPOCH = -1  # Of a record whose epoch Kafka does not tell.


class Message:
    """A record, or that the partition has been read to its end."""

    def __init__(self, offset: int, epoch: int | None, partition: int = 0) -> None:
        self._offset, self._epoch, self._partition = offset, epoch, partition

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._partition

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
    with pytest.raises(TruncatedWhileRead, match="the partition 0 of t was truncated"):
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


@pytest.mark.parametrize("end", [3, 4], ids=["at the end", "behind markers"])
def test_a_record_that_was_read_and_then_deleted_by_retention_is_no_cut(end: int) -> None:
    client = ClientOfMany([Partition(0)], random.Random(0))
    partition = client.partitions[0]
    partition.log += [Entry(0, True)] * 3
    reading = reading_of(client)
    assert read(reading, 100, 5) == [0, 1, 2]
    partition.log += [Entry(0, False)] * 2
    partition.beginning = end
    assert read(reading, 100, 5) == []
    partition.log += [Entry(1, True)] * 2
    assert read(reading, 100, 9) == [5, 6]


class Entry(NamedTuple):
    """What stands at an offset; readers of committed records get no marker, and nothing of an aborted transaction."""

    epoch: int
    is_returned: bool


class Partition:
    """A partition, and what a client knows of it, which fetches ahead."""

    def __init__(self, epoch: int) -> None:
        self.log: list[Entry] = []
        self.epoch, self.beginning = epoch, 0
        self.cut_at: int | None = None
        self.is_cut_heard_of = True
        self.fetched: list[tuple[int, int | None]] = []
        self.at, self.end_told = 0, -1

    def records(self) -> list[tuple[int, int]]:
        entries = enumerate(self.log)
        return [(offset, each.epoch) for offset, each in entries if each.is_returned and offset >= self.beginning]

    def append(self, *are_returned: bool) -> None:
        self.log += [Entry(self.epoch, is_returned) for is_returned in are_returned]

    def cut(self, end: int) -> None:
        """Once at most: a second cut at the offset of the first one is not noticed while its records are read."""
        if self.cut_at is None:
            del self.log[end:]
            self.cut_at, self.is_cut_heard_of = end, False
            self.epoch += 1

    def hear_of_cut(self) -> None:
        """As librdkafka, which goes back to the cut, and drops what it has fetched."""
        if not self.is_cut_heard_of and self.cut_at is not None and self.at > self.cut_at:
            self.seek(self.cut_at)
        self.is_cut_heard_of = True

    def seek(self, offset: int) -> None:
        self.fetched.clear()
        self.at, self.end_told = offset, -1

    def fetch(self, most: int) -> None:
        if not self.beginning <= self.at <= len(self.log):
            self.at, self.end_told = self.beginning, -1
        for offset in range(self.at, min(len(self.log), self.at + most)):
            if self.log[offset].is_returned:
                self.fetched.append((offset, self.log[offset].epoch))
            self.at = offset + 1
        if self.at == len(self.log) != self.end_told:
            self.fetched.append((self.at, None))
            self.end_told = self.at

    @property
    def is_polled(self) -> bool:
        return not self.fetched and self.at == self.end_told == len(self.log)


class ClientOfMany:
    """A consumer of several partitions."""

    def __init__(self, partitions: list[Partition], dice: random.Random) -> None:
        self.partitions, self._dice = partitions, dice

    def seek(self, partition: TopicPartition) -> None:
        self.partitions[partition.partition].seek(partition.offset)

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        known = self.partitions[partition.partition]
        return known.beginning, len(known.log)

    def consume(self, most: int, seconds: float) -> list[Message]:
        polled: list[Message] = []
        for number, partition in enumerate(self.partitions):
            partition.fetch(self._dice.choice([1, 3, 20]))
            while partition.fetched and len(polled) < most:
                polled.append(Message(*partition.fetched.pop(0), number))
        return polled


def happen(partition: Partition, dice: random.Random) -> None:
    """Something happens to a partition."""
    match dice.choice(["records", "records", "transaction", "marker", "leader", "cut", "hear", "hear", "retention"]):
        case "records":
            partition.append(*[True] * dice.randint(1, 4))
        case "transaction":
            partition.append(*[dice.random() < 0.5] * dice.randint(0, 3), False)
        case "marker":
            partition.append(False)
        case "leader":
            partition.epoch += 1
        case "cut":
            partition.cut(dice.randint(partition.beginning, len(partition.log)))
            partition.append(*dice.choices([True, False], k=dice.randint(0, 5)))
        case "hear":
            partition.hear_of_cut()
        case "retention" if dice.random() < 0.3:
            partition.beginning = dice.randint(partition.beginning, len(partition.log))


class Schedule:
    """What happens to partitions while they are read, by a seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.partitions = [Partition(self.dice.randint(0, 2)) for _ in range(self.dice.randint(1, 2))]
        client: Any = ClientOfMany(self.partitions, self.dice)
        self._reading = TruncationAwareReader(client, "t", dict.fromkeys(range(len(self.partitions)), 0))
        self._most = self.dice.choice([1, 2, 100])
        self.read: list[list[tuple[int, int]]] = [[] for _ in self.partitions]

    def run(self) -> None:
        for _ in range(self.dice.randint(2, 25)):
            happen(self.dice.choice(self.partitions), self.dice)
            if self.dice.random() < 0.5:
                self._poll(1)
        for partition in self.partitions:
            partition.hear_of_cut()
        self._poll(100)
        for partition, read in zip(self.partitions, self.read, strict=True):
            if not set(read) <= {(offset, each.epoch) for offset, each in enumerate(partition.log) if each.is_returned}:
                partition.append(*[True] * 20)  # That what was read is gone shows where others follow.
        self._poll(200)

    def _poll(self, times: int) -> None:
        for each in chain.from_iterable(self._reading.consume(self._most, 0.0) for _ in range(times)):
            if each.error() is None:
                self.read[each.partition() or 0].append((each.offset() or 0, each.leader_epoch() or 0))


@pytest.mark.parametrize("first_seed", [0, 1_000])
def test_in_every_schedule_a_reader_returns_what_kafka_has_or_fails_for_a_cut(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 1_000):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except TruncatedWhileRead:
            if not any(each.cut_at is not None for each in schedule.partitions):
                raise AssertionError(f"seed {seed}: nothing was cut") from None
            continue
        for partition, read in zip(schedule.partitions, schedule.read, strict=True):
            assert partition.is_polled, f"seed {seed}: it reads for ever"
            assert [each for each in read if each[0] >= partition.beginning] == partition.records(), f"seed {seed}"
