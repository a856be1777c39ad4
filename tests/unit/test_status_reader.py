"""`read_status` shows what one slow partition of the leader topic leaves readable, within its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_plugin import Settings
from outbox_plugin.adapters import kafka_reader, topic_metadata
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, Phase
from outbox_plugin.errors import ServerRefused
from outbox_plugin.status import reader
from outbox_plugin.status.reader import read_status
from outbox_plugin.threads import deadline_future
from tests.clock import SimulatedTime

SECONDS = 60.0  # Simulated ones: they pass at once.
CLOCK = SimulatedTime()
SETTINGS = Settings(dsn="postgresql://nowhere/db", bootstrap_servers="nowhere:1", shards=3)


class Record:
    """A harvester's heartbeat; its sender's clock is so many seconds ahead of ours."""

    def __init__(self, shard: int, offset: int = 0, ahead: float = 0.0, phase: Phase = "leader") -> None:
        self._shard = shard
        self._offset = offset
        self._ahead = ahead
        self._phase: Phase = phase

    def partition(self) -> int:
        return self._shard

    def offset(self) -> int:
        return self._offset

    def error(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, int((CLOCK.time() + self._ahead) * 1000)

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        heartbeat = LeaderHeartbeat(self._shard, self._phase, "term", f"h-{self._shard}", "host", 1, "now", "i", "p")
        return heartbeat.encode()

    def headers(self) -> None:
        return None

    def topic(self) -> None:
        return None

    def leader_epoch(self) -> int:
        return 0


class Client:
    """A consumer of a leader topic with three partitions, each of which has one heartbeat.

    Leaders that are `living` send another one when the first has been read, behind one of a harvester that waits to
    lead. Their clocks are `ahead` of ours. Partitions that are `alone` have one of three replicas in sync.
    """

    def __init__(
        self,
        failures: Mapping[int, Callable[[float], None]],
        silent: frozenset[int],
        living: frozenset[int],
        ahead: Mapping[int, float],
        alone: frozenset[int],
    ) -> None:
        self._failures = failures
        self._silent = silent
        self._living = living
        self._ahead = ahead
        self._alone = alone
        self._assigned: dict[int, int] = {}

    def list_topics(self, topic: str, timeout: float) -> Any:
        partitions = {
            number: SimpleNamespace(id=number, replicas=[1, 2, 3], isrs=[1] if number in self._alone else [1, 2, 3])
            for number in range(3)
        }
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=partitions)})

    def get_watermark_offsets(
        self, partition: TopicPartition, *, timeout: float = 0.0, cached: bool = False
    ) -> tuple[int, int]:
        if cached:  # As of the last fetch.
            return 0, 1
        if partition.partition in self._failures:
            self._failures[partition.partition](timeout)
        return 0, 1

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._assigned = {each.partition: each.offset for each in partitions}

    def consume(self, most: int, seconds: float) -> list[Record]:
        ready = [
            number
            for number, offset in self._assigned.items()
            if number not in self._silent and (offset == 0 or number in self._living)
        ]
        if not ready:
            CLOCK.sleep(seconds)
            return []
        CLOCK.sleep(0.01)
        offset = self._assigned.pop(ready[0])
        if offset == 1:
            self._assigned[ready[0]] = 2
            return [Record(ready[0], offset, phase="waiting")]
        return [Record(ready[0], offset, self._ahead.get(ready[0], 0.0))]

    def close(self) -> None:
        pass


def no_answer(timeout: float) -> None:
    CLOCK.sleep(timeout)
    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


def no_leader(timeout: float) -> None:
    raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))


def forbidden(timeout: float) -> None:
    raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., reader.Status]:
    def refuse(settings: Settings, seconds: float) -> None:
        raise ServerRefused("Postgres is not part of this test")

    def read_with(
        failures: Mapping[int, Callable[[float], None]] | None = None,
        silent: frozenset[int] = frozenset(),
        living: frozenset[int] = frozenset(),
        ahead: Mapping[int, float] | None = None,
        alone: frozenset[int] = frozenset(),
    ) -> reader.Status:
        for module in (reader, kafka_reader, topic_metadata, deadline_future):
            monkeypatch.setattr(module, "time", CLOCK)
        monkeypatch.setattr(reader, "_read_table", refuse)
        monkeypatch.setattr(
            reader, "Consumer", lambda config: Client(failures or {}, silent, living, ahead or {}, alone)
        )
        began = CLOCK.monotonic()
        status = read_status(SETTINGS, SECONDS)
        assert CLOCK.monotonic() - began < SECONDS
        return status

    return read_with


def leaders(status: reader.Status) -> list[int]:
    return [shard.shard for shard in status.shards if shard.leader]


def test_every_leader_is_shown(read: Callable[..., reader.Status]) -> None:
    status = read()
    assert (leaders(status), status.errors) == ([0, 1, 2], ("Postgres is not part of this test",))


@pytest.mark.parametrize("failure", [no_answer, no_leader])
def test_a_partition_without_an_answer_hides_its_own_leader_alone(
    read: Callable[..., reader.Status], failure: Callable[[float], None]
) -> None:
    status = read({0: failure})
    assert leaders(status) == [1, 2]
    assert status.errors[1:] == ("Kafka did not answer in time for 0 of the leader topic's partitions",)


def test_a_partition_that_delivers_nothing_hides_its_own_leader_alone(read: Callable[..., reader.Status]) -> None:
    status = read(silent=frozenset({1, 2}))
    assert leaders(status) == [0]
    assert status.errors[1:] == ("Kafka did not answer in time for 1, 2 of the leader topic's partitions",)


def test_where_no_partition_answers_kafka_cannot_be_reached(read: Callable[..., reader.Status]) -> None:
    status = read(dict.fromkeys(range(3), no_answer))
    assert leaders(status) == []
    assert "nowhere:1" in status.errors[1]


def test_a_refusal_is_shown_at_once(read: Callable[..., reader.Status]) -> None:
    status = read({2: forbidden})
    assert leaders(status) == []
    assert "Kafka" in status.errors[1]


@pytest.mark.parametrize("living", [{1}, {0, 1}])
@pytest.mark.parametrize("ahead", [3_600.0, -3_600.0, 2.5, -2.5])
def test_who_leads_is_told_whatever_the_clocks_say(
    read: Callable[..., reader.Status], ahead: float, living: set[int]
) -> None:
    """Of two leaders whose clocks are wrong, one lives or both do."""
    status = read(living=frozenset(living), ahead={0: ahead, 1: ahead})
    assert leaders(status) == [*sorted(living), 2]
    assert status.errors == ("Postgres is not part of this test",)


def test_why_a_partition_takes_no_heartbeats_is_said_where_no_leader_is_heard(
    read: Callable[..., reader.Status],
) -> None:
    """The clients say nothing of it, and the harvesters cannot: they would say so on that topic."""
    status = read(ahead={0: -3_600.0}, alone=frozenset({0, 1}))
    assert leaders(status) == [1, 2]
    assert [shard.trouble for shard in status.shards] == [
        "partition 0 of the topic outbox-leader has 1 of 3 replicas in sync; if its min.insync.replicas asks for more, "
        "it takes no heartbeats, and nobody can lead",
        None,
        None,
    ]


@pytest.mark.parametrize(("phase", "age", "is_suspected"), [("candidate", 0.1, False), ("leader", 3.0, True)])
def test_a_partition_that_takes_the_heartbeats_of_one_that_only_tries_to_lead_is_not_suspected(
    phase: Phase, age: float, is_suspected: bool
) -> None:
    heartbeat = LeaderHeartbeat(0, phase, "term", "h-1", "host", 1, "now", "i", "p", trouble="Kafka: away")
    shown = reader._shard_status(0, reader._PartitionTail([(heartbeat, age)]), None, "1 of 3 replicas in sync")
    assert shown.trouble == ("1 of 3 replicas in sync" if is_suspected else "Kafka: away")


def test_one_that_only_tries_to_lead_hides_no_trouble_of_those_before_it() -> None:
    failed = LeaderHeartbeat(0, "resigned", "first", "h-1", "host", 1, "now", "i", "p", trouble="Kafka: away")
    tries = LeaderHeartbeat(0, "candidate", "second", "h-2", "host", 2, "now", "i", "p")
    leads = replace(tries, phase="leader")
    shown = [
        reader._shard_status(0, reader._PartitionTail([(failed, 0.5), (last, 0.1)]), None, None).trouble
        for last in (tries, leads)
    ]
    assert shown == ["Kafka: away", None]
