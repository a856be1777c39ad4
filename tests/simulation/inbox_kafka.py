"""The Kafka of `inboxes`: topics, logs that are cut, and what librdkafka does for an inbox.

A client fetches some records of a partition ahead, and returns them one by one. What it does when a partition is
paused or cut is taken from librdkafka 2.16:

- a pause drops what was fetched ahead; a resumed partition is fetched from where the last record was returned, or from
  where it was told to begin. A pause lasts until it is ended, even if the partition goes and comes back;
- a client that has read records knows their epoch. When it hears of a cut, it goes back to where its epoch ends now,
  which drops what it has fetched ahead. If the broker does not know that epoch any more, or the offset is out of range,
  it goes to the beginning of the partition, and a pause before a record is returned takes it back to where it was;
- a seek does all that a pause does, and has it forget the epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters import topic_ids
from outbox_plugin.core.topic_partition import TopicPartition
from tests.inbox_support import NOWHERE
from tests.simulation.inbox_plan import TOPICS, Chance

NOTHING_COMMITTED = -1001
UNKNOWN_OFFSET = -1001
UNNAMED = b" without a name"  # The end of the values of records without an idempotency key.


class Stored(NamedTuple):
    """A record of a log. What no inbox gets has no name: a transaction marker, an aborted or a compacted record."""

    name: str | None
    epoch: int
    timestamp: float
    topic_id: str


class Place(NamedTuple):
    """Where a record was appended."""

    tp: TopicPartition
    offset: int
    stored: Stored


class Log:
    """A partition, and the offset that the group has committed."""

    def __init__(self, topic: Topic, number: int) -> None:
        self._topic = topic
        self.tp = TopicPartition(topic.name, number)
        self.committed: KafkaTopicPartition | None = None
        self.records: list[Stored] = []
        self.recreate()

    def recreate(self) -> None:
        """Begin as an empty log."""
        self.end_before = self.end
        self.records = []
        self.beginning = self.epoch = 0

    def __str__(self) -> str:
        return f"{self.tp.topic}/{self.tp.partition}"

    @property
    def topic_id(self) -> str:
        return self._topic.topic_id

    @property
    def end(self) -> int:
        return len(self.records)

    @property
    def last(self) -> int:
        """The offset of the last record that an inbox gets; -1 if there is none."""
        return max((at for at, each in enumerate(self.records) if each.name is not None), default=-1)

    def covers(self, offset: int, stored: Stored) -> bool:
        """Whether the offset that was committed lies above a record."""
        at = self.committed
        if at is None or at.metadata != stored.topic_id:
            return False
        return offset < at.offset and stored.epoch <= (at.leader_epoch or 0)

    def end_of(self, epoch: int) -> int:
        """The first offset of a later epoch, or the end."""
        later = (at for at, each in enumerate(self.records) if each.epoch > epoch)
        return next(later, self.end)

    def names(self) -> list[str]:
        """The names of the records that there are."""
        return [each.name for each in self.records[self.beginning :] if each.name is not None]


class Topic:
    """A topic, which may be deleted and created again."""

    def __init__(self, name: str, partitions: int) -> None:
        self.name = name
        self.incarnation = 0
        self.logs = [Log(self, number) for number in range(partitions)]

    @property
    def topic_id(self) -> str:
        return f"{self.name:A<15}{self.incarnation:07}"

    def recreate(self) -> None:
        """Delete the topic, and create one of its name."""
        self.incarnation += 1
        for log in self.logs:
            log.recreate()


class Kafka:
    """The topics of a schedule."""

    def __init__(self, partitions: int) -> None:
        self.topics: dict[str, Topic] = {}
        for name, most in TOPICS.items():
            if partitions > 0:
                self.topics[name] = Topic(name, min(most, partitions))
                partitions -= most
        self.logs = {log.tp: log for topic in self.topics.values() for log in topic.logs}
        self.places: dict[str, Place] = {}
        self._number = 0

    def append(self, log: Log, timestamp: float, *, unnamed: bool = False, bad: bool = False) -> str:
        """Append a record, and return its name. A record without a name in Kafka has one for the judge, too."""
        self._number += 1
        name = f"record {self._number}{' bad' if bad else ''}{UNNAMED.decode() if unnamed else ''}"
        stored = Stored(name, log.epoch, timestamp, log.topic_id)
        self.places[name] = Place(log.tp, log.end, stored)
        log.records.append(stored)
        return name

    def log_of(self, partition: KafkaTopicPartition) -> Log:
        return self.logs[TopicPartition(partition.topic, partition.partition)]


class _Fetched:
    """Where a client is in a partition that it was assigned."""

    def __init__(self, chance: Chance, log: Log) -> None:
        self._chance = chance
        self.log = log
        self.has_begun = False
        self.watermarks = UNKNOWN_OFFSET, UNKNOWN_OFFSET  # As they were when the partition was fetched.
        self._is_to_look = False  # For a cut.
        self._ahead: deque[Any] = deque()

    def go_to(self, offset: int, epoch: int | None = None) -> None:
        """Fetch from an offset on; the epoch of the record before is known, or not."""
        places = {OFFSET_BEGINNING: self.log.beginning, OFFSET_END: self.log.end}
        self._start = places.get(offset, offset), epoch
        self.at, self._epoch = self._start  # The epoch is that of the record before.
        self._returned: tuple[int, int] | None = None  # Behind the record that was returned last, and its epoch.
        self._end_told: int | None = None  # The end of which it has told last.
        self._is_to_look = False
        self._ahead.clear()

    def pause(self) -> None:
        """Drop what was fetched ahead."""
        self._start = self._returned or self._start
        self.at, self._epoch = self._start
        self._end_told = None
        self._ahead.clear()

    def was_recreated(self) -> None:
        """Go on at the beginning of the topic that there is now, also after a pause."""
        self._is_to_look, self._returned = False, None
        self._reset()

    def was_cut(self) -> None:
        """Hear of a new epoch, now or when more is fetched."""
        self._is_to_look = True
        if not self._ahead or self._chance.dice.random() < 0.8:
            self._look_for_a_cut()

    def _look_for_a_cut(self) -> None:
        looks, self._is_to_look = self._is_to_look, False
        if not looks or (epoch := self._epoch) is None:
            return
        way, end = self._chance.dice.random(), max(self.log.end_of(epoch), self.log.beginning)
        if self.at <= end:
            return
        if way < 0.3:
            self._reset()
        else:
            self.go_to(end, epoch)

    def _reset(self) -> None:
        """Go to the beginning. What was fetched ahead is returned before, and what was returned last stays known."""
        self._start = self.log.beginning, None
        self.at, self._epoch = self._start
        self._end_told = None

    def has_returned_up_to(self, offset: int) -> None:
        """Go on at an offset, after its record was returned."""
        self._epoch = self.log.records[offset - 1].epoch
        self.at, self._returned, self.has_begun = offset, (offset, self._epoch), True
        self._ahead.clear()

    @property
    def has_records_ahead(self) -> bool:
        return any(each.error() is None for each in self._ahead)

    @property
    def has_reached_end(self) -> bool:
        return self.at == self.log.end and not self._ahead

    def next(self) -> Any:
        """Return the next record, or that it has reached the end; None if there is nothing new."""
        if not self._ahead:
            self._look_for_a_cut()
            self.fetch()
        if not self._ahead:
            return None
        message = self._ahead.popleft()
        if message.error() is None:
            self._returned = message.offset() + 1, message.leader_epoch()
        return message

    def fetch(self) -> None:
        """Fetch some records ahead."""
        self.has_begun = True
        self.watermarks = self.log.beginning, self.log.end
        if not self.log.beginning <= self.at <= self.log.end:
            self._reset()
        number = self._chance.dice.randint(1, 20)
        while self.at < self.log.end and len(self._ahead) < number:
            offset, stored = self.at, self.log.records[self.at]
            self.at, self._epoch = self.at + 1, stored.epoch
            if stored.name is not None:
                self._ahead.append(polled(self.log.tp, offset, stored))
        if self.at == self.log.end != self._end_told:
            self._end_told = self.at
            self._ahead.append(_end_message(self.log.tp, self.at))


class Client:
    """librdkafka's consumer, as the product uses it."""

    def __init__(self, chance: Chance, kafka: Kafka, owns: Callable[[TopicPartition], bool]) -> None:
        """`owns` says whether a partition is this member's: nobody else may commit an offset of it."""
        self._chance = chance
        self._kafka = kafka
        self._owns = owns
        self.assigned: dict[TopicPartition, _Fetched] = {}
        self.paused: set[TopicPartition] = set()

    def committed(self, asked: Sequence[KafkaTopicPartition], timeout: float) -> list[KafkaTopicPartition]:
        self._chance.may_fail(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        found = ((self._kafka.log_of(each).committed, each) for each in asked)
        return [at or KafkaTopicPartition(each.topic, each.partition, NOTHING_COMMITTED) for at, each in found]

    def commit(self, offsets: list[KafkaTopicPartition], asynchronous: bool) -> None:
        self._chance.may_fail(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        if not all(self._owns(_tp(each)) for each in offsets):
            return  # Kafka refuses all of them, but nobody waits for the answer.
        for each in sorted(offsets, key=_tp):
            self._kafka.log_of(each).committed = each
            self._chance.say(f"commits {each.offset} of {_name(each)}, epoch {each.leader_epoch}")

    def incremental_assign(self, partitions: list[KafkaTopicPartition]) -> None:
        for each in partitions:
            fetched = self.assigned[_tp(each)] = _Fetched(self._chance, self._kafka.log_of(each))
            fetched.go_to(each.offset)

    def incremental_unassign(self, partitions: list[KafkaTopicPartition]) -> None:
        for each in partitions:
            del self.assigned[_tp(each)]

    def seek(self, partition: KafkaTopicPartition) -> None:
        fetched = self.assigned.get(_tp(partition))
        if fetched is None or not fetched.has_begun:
            raise KafkaException(KafkaError(KafkaError._STATE))
        fetched.go_to(partition.offset)

    def get_watermark_offsets(
        self, partition: KafkaTopicPartition, timeout: float = 0.0, cached: bool = False
    ) -> tuple[int, int]:
        log = self._kafka.log_of(partition)
        if cached:
            return self.assigned[log.tp].watermarks
        self._chance.may_fail(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        return log.beginning, log.end

    def pause(self, partitions: list[KafkaTopicPartition]) -> None:
        for tp in sorted(map(_tp, partitions)):
            self.paused.add(tp)
            self._chance.say(f"pauses {_name(tp)}")
            if tp in self.assigned:
                self.assigned[tp].pause()

    def resume(self, partitions: list[KafkaTopicPartition]) -> None:
        self.paused.difference_update(map(_tp, partitions))

    def close(self) -> None: ...

    def has_reached_end(self, tp: TopicPartition) -> bool:
        """Whether it has returned all records of a partition."""
        return self.assigned[tp].has_reached_end

    def with_records_ahead(self) -> set[TopicPartition]:
        """The partitions of which it has fetched records, and not returned them."""
        return {tp for tp, each in self.assigned.items() if each.has_records_ahead}

    def poll(self, timeout: float) -> Any:
        """Return a record of some partition, or that it has reached an end; None if there is nothing new."""
        fetched = [self.assigned[tp] for tp in sorted(self.assigned) if tp not in self.paused]
        self._chance.dice.shuffle(fetched)
        return next((found for each in fetched if (found := each.next()) is not None), None)

    def consume(self, number: int, timeout: float) -> list[Any]:
        """Return a few records more."""
        found = [self.poll(0) for _ in range(min(number, self._chance.dice.randint(0, 5)))]
        return [each for each in found if each is not None]


def make_topic_ids(chance: Chance, kafka: Kafka) -> topic_ids.TopicIds:
    """What one inbox knows of the topics' ids."""

    def describe(topics: TopicCollection, request_timeout: float) -> dict[str, Future[Any]]:
        return {name: _answer(name) for name in topics.topic_names}

    def _answer(name: str) -> Future[Any]:
        answer: Future[Any] = Future()
        if chance.is_silent():
            answer.set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        else:
            answer.set_result(SimpleNamespace(topic_id=kafka.topics[name].topic_id))
        return answer

    admin = SimpleNamespace(client=SimpleNamespace(describe_topics=describe), close=lambda: None)
    with mock.patch.object(topic_ids, "KafkaAdmin", return_value=admin):
        return topic_ids.TopicIds(NOWHERE)


def number_of(name: str) -> int:
    """A record's number, by the order in which they were appended."""
    return int(name.split()[1])


def key_of(name: str) -> bytes:
    """A record's key."""
    return b"%d" % (number_of(name) % 4)


def polled(tp: TopicPartition, offset: int, stored: Stored) -> Any:
    """A record as librdkafka returns it."""
    assert stored.name is not None
    name = stored.name.encode()
    answers = {
        "error": None,
        "topic": tp.topic,
        "partition": tp.partition,
        "offset": offset,
        "leader_epoch": stored.epoch,
        "timestamp": (1, int(stored.timestamp * 1000)),
        "key": key_of(stored.name),
        "value": name,
        "headers": [] if name.endswith(UNNAMED) else [("idempotency-key", name)],
    }
    return SimpleNamespace(**{each: lambda answer=answer: answer for each, answer in answers.items()})


def _end_message(tp: TopicPartition, offset: int) -> Any:
    end = KafkaError(KafkaError._PARTITION_EOF)
    return SimpleNamespace(
        error=lambda: end, topic=lambda: tp.topic, partition=lambda: tp.partition, offset=lambda: offset
    )


def _tp(partition: KafkaTopicPartition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.partition)


def _name(partition: KafkaTopicPartition | TopicPartition) -> str:
    return f"{partition.topic}/{partition.partition}"


def as_assigned(partitions: Collection[TopicPartition]) -> list[KafkaTopicPartition]:
    """Partitions as the group's leader names them."""
    return [KafkaTopicPartition(*tp) for tp in partitions]
