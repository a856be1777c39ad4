"""Which records of the leader topic were there when a harvester began to listen, and what they tell."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from outbox_plugin.adapters import kafka_reader
from outbox_plugin.adapters.leader_topic_tail import LeaderTopicTail
from outbox_plugin.core.heartbeat_codec import LeaderRecord
from outbox_plugin.core.last_leader import TAIL_HEARTBEATS
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from tests.clock import SimulatedTime

RESIGNED = LeaderHeartbeat(0, "resigned", "a", "a-host", "host", 1, "now", "incarnation", "place")


class Consumer:
    """Kafka keeps the offsets from `first` to `end`; it names neither if that is None."""

    def __init__(self, first: int | None, end: int | None) -> None:
        self._offsets = {OFFSET_BEGINNING: first, OFFSET_END: end}

    def list_topics(self, topic: str, timeout: float) -> None:
        """They are not looked at."""

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        found = []
        for each in partitions:
            if (offset := self._offsets[each.offset]) is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            found.append(TopicPartition(each.topic, each.partition, offset))
        return found


@pytest.fixture(autouse=True)
def _kafka_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_reader, "time", SimulatedTime())


def tail(first: int | None, end: int | None) -> LeaderTopicTail:
    consumer: Any = Consumer(first, end)
    return LeaderTopicTail(consumer, "t", [0])


def starts(tail: LeaderTopicTail) -> list[int]:
    return [each.offset for each in tail.starts]


def was_there(tail: LeaderTopicTail, offset: int) -> bool:
    return tail.take(LeaderRecord(0, offset, None, None, None), RESIGNED)


def test_a_few_records_before_the_end_are_read_and_no_later_one_is_taken_for_them() -> None:
    found = tail(3, 5)
    assert starts(found) == [3]
    assert [was_there(found, offset) for offset in (3, 4, 5)] == [True, True, False]
    assert found.take_vacant() == {0}
    assert found.take_vacant() == set()
    assert starts(tail(3, 1_000)) == [1_000 - TAIL_HEARTBEATS]


def test_it_is_not_known_who_leads_before_all_of_them_have_been_read() -> None:
    found = tail(3, 5)
    assert was_there(found, 3)
    assert found.take_vacant() == set()


@pytest.mark.parametrize("offset", [0, 5, 100])
def test_where_they_are_gone_all_records_are_new_and_tell_nothing(offset: int) -> None:
    """The topic was recreated, or they were deleted, before they were read."""
    found = tail(3, 5)
    assert [was_there(found, each) for each in (offset, 4)] == [False, False]
    assert found.take_vacant() == set()


def test_of_several_partitions_nothing_old_is_read() -> None:
    """A harvester of several shards listens before it leads any: it would read them for nothing."""
    consumer: Any = Consumer(3, 9)
    found = LeaderTopicTail(consumer, "t", range(2))
    assert starts(found) == [9, 9]
    assert found.take_vacant() == set()


def test_an_empty_partition_has_no_leader() -> None:
    found = tail(7, 7)
    assert starts(found) == [7]
    assert found.take_vacant() == {0}
    assert not was_there(found, 7)


@pytest.mark.parametrize(("first", "end", "start"), [(None, 9, 9), (None, None, OFFSET_END), (3, None, OFFSET_END)])
def test_where_kafka_does_not_say_where_they_are_all_records_are_new(
    first: int | None, end: int | None, start: int
) -> None:
    found = tail(first, end)
    assert starts(found) == [start]
    assert not was_there(found, 8)
    assert found.take_vacant() == set()
