"""What a consumer cannot be asked for, said in one line before anything is connected; and how long a `poll` takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters import kafka_admin
from outbox_plugin.coordination import Admin, Consumer, consumer
from outbox_plugin.coordination.claims import Claim
from outbox_plugin.coordination.fetch_buffer import FetchBuffer, MayHandOut
from outbox_plugin.core.leader_epochs import LeaderEpochs
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import InvalidSetting, ServerRefused, UserError
from tests.processes import ASKS_BROKERS_BRIEFLY

GIVEN: dict[str, Any] = {
    "topics": ["orders"],
    "group_id": "billing",
    "client_id": "one",
    "bootstrap_servers": "127.0.0.1:1",
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"topics": "orders"}, "topics: expected a list of topic names"),
        ({"topics": []}, "topics: expected a list of topic names"),
        ({"guarantee": "exactly-once"}, "guarantee: expected at-least-once or at-most-once"),
        ({"max_claims": 0}, "max_claims: expected 1 or more"),
        ({"heartbeat_interval_seconds": 0.5}, "heartbeat_interval_seconds: expected 1 or more"),
        ({"heartbeat_interval_seconds": float("nan")}, "heartbeat_interval_seconds: expected 1 or more"),
        ({"client_id": "a/b"}, "client_id: contains `/`"),
        ({"client_id": ""}, "client_id: is empty"),
        ({"group_id": ""}, "group_id: is empty"),
        ({"topics": ["a/b"]}, "topic: contains `/`"),
    ],
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        Consumer(**{**GIVEN, **wrong})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_brokers_are_needed() -> None:
    with pytest.raises(InvalidSetting, match="OUTBOX_BOOTSTRAP_SERVERS is not set"):
        Admin()


def test_a_property_that_the_promise_rests_on_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"enable\.auto\.commit"):
        Consumer(**GIVEN, kafka={"enable.auto.commit": "true"})


def test_a_broker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_admin, "REACH_SECONDS", 0.5)
    with pytest.raises(ServerRefused, match=r"127\.0\.0\.1:1"):
        Consumer(**GIVEN)


def test_the_command_line_says_so_in_one_line() -> None:
    command = [sys.executable, "-c", ASKS_BROKERS_BRIEFLY + "import outbox_plugin.__main__", "consumers", "list"]
    env = {"OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert said.stderr.startswith("outbox: Kafka, as OUTBOX_BOOTSTRAP_SERVERS names it (127.0.0.1:1)")


class UnansweredInstance:
    """It holds two partitions; the log answers for the second, and for the first once it `answers`."""

    def __init__(self) -> None:
        self.held = {TopicPartition("silent", 0): Claim(0), TopicPartition("orders", 0): Claim(0)}
        self.answers = False
        self.now = 0.0

    def claims(self) -> dict[TopicPartition, Claim]:
        return dict(self.held)

    def promise(self, claims: Mapping[TopicPartition, tuple[Claim, int]], wait_seconds: float) -> None:
        assert self.now < 100, "it asks again and again"
        for tp, (claim, end) in claims.items():
            if self.answers or tp.topic == "orders":
                claim.promise(end)
            else:
                self.now += wait_seconds

    def may_hand_out(self, tp: TopicPartition, claim: Claim, offset: int) -> MayHandOut:
        return MayHandOut.YES if offset < claim.promised else MayHandOut.NOT_YET

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def test_at_most_once_a_poll_ends_though_the_log_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a partition of the coordination topic has no leader: only what is talked about there waits."""
    instance, polling = UnansweredInstance(), object.__new__(Consumer)
    monkeypatch.setattr(consumer, "time", SimpleNamespace(monotonic=lambda: instance.now, sleep=instance.pass_time))
    records: dict[TopicPartition, Any] = {tp: SimpleNamespace(topic=tp.topic) for tp in instance.held}
    fetched: FetchBuffer[Any] = FetchBuffer()
    for tp, claim in instance.held.items():
        fetched.add(tp, claim, 0, records[tp])
    state: dict[str, Any] = {
        "_stopped": False,
        "_followed": float("inf"),
        "_at_most_once": True,
        "_assigned": instance.held,
        "_instance": instance,
        "_reader": SimpleNamespace(poll=instance.pass_time),
        "_fetched": fetched,
        "_paused": set(),
        "_asked": {},
        "_epochs": LeaderEpochs(),
    }
    vars(polling).update(state)
    orders, silent = records[TopicPartition("orders", 0)], records[TopicPartition("silent", 0)]
    assert polling.poll(60.0) is orders
    began = instance.now
    assert polling.poll(2.5) is None
    assert instance.now - began <= 2.5 + consumer.FOLLOW_SECONDS + consumer.MIN_PROMISE_SECONDS
    instance.answers = True
    assert polling.poll(2.5) is silent


class SlowInstance:
    """It holds one partition. Three asks after it was asked, the log answers, if the same is asked still."""

    def __init__(self) -> None:
        self.held = {TopicPartition("orders", 0): Claim(0)}
        self.asked: list[int] = []

    def claims(self) -> dict[TopicPartition, Claim]:
        return dict(self.held)

    def promise(self, claims: Mapping[TopicPartition, tuple[Claim, int]], _: float) -> None:
        for claim, end in claims.values():
            if end in self.asked[:-2]:
                claim.promise(end)
            self.asked.append(end)


def test_what_was_fetched_is_promised_by_a_log_that_answers_late_while_more_comes() -> None:
    instance, fetching = SlowInstance(), object.__new__(Consumer)
    [(tp, claim)] = instance.held.items()
    fetched: FetchBuffer[Any] = FetchBuffer()
    coming = iter(range(100))

    def take_in(_seconds: float) -> None:
        fetched.add(tp, claim, next(coming), SimpleNamespace())

    state: dict[str, Any] = {"_at_most_once": True, "_instance": instance, "_fetched": fetched, "_take_in": take_in}
    state |= {"_asked": {}, "_paused": set()}
    vars(fetching).update(state)
    for _ in range(10):
        fetching._fetch(0.0, 0.0)
    assert claim.promised > 0


def test_a_poll_without_time_fetches_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a user who polls beside work of its own would never get a record."""
    instance, polling = UnansweredInstance(), object.__new__(Consumer)
    ticks = iter(range(100))
    monkeypatch.setattr(consumer, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 1e-6))
    instance.held[TopicPartition("orders", 0)].promise(1)
    arrived: Any = {"error": None, "topic": "orders", "partition": 0, "offset": 0}
    arrived |= {"key": None, "value": None, "headers": None, "leader_epoch": None}
    record = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in arrived.items()})
    waits: list[float] = []

    def poll(wait_seconds: float) -> Any:
        waits.append(wait_seconds)
        return record if len(waits) == 1 else None

    state: dict[str, Any] = {
        "_stopped": False,
        "_followed": float("inf"),
        "_at_most_once": False,
        "_assigned": instance.held,
        "_instance": instance,
        "_reader": SimpleNamespace(
            poll=poll, consume=lambda count, seconds: [], get_watermark_offsets=lambda *_, **__: (0, 100)
        ),
        "_fetched": FetchBuffer(),
        "_paused": set(),
        "_asked": {},
        "_epochs": LeaderEpochs(),
    }
    vars(polling).update(state)
    assert [polling.poll(0.0), polling.poll(0.0)] == [record, None]
    assert waits == [0.0, 0.0]


class FakeReader:
    """Has endless records of each partition, in the order of `partitions`, but for those that are paused."""

    def __init__(self, *partitions: str, size: int = 0, many: int = 700) -> None:
        self.partitions = partitions
        self.paused: set[str] = set()
        self.value = b"x" * size
        self.many = many
        self.offsets = dict.fromkeys(partitions, 0)

    def poll(self, wait_seconds: float) -> SimpleNamespace | None:
        return next(iter(self.consume(1, wait_seconds)), None)

    def consume(self, most: int, wait_seconds: float) -> list[SimpleNamespace]:
        for topic in self.partitions:
            if topic not in self.paused:
                return [self._record(topic) for _ in range(min(most, self.many))]
        return []

    def get_watermark_offsets(self, partition: KafkaTopicPartition, *, cached: bool) -> tuple[int, int]:
        return 0, 100_000

    def pause(self, partitions: Sequence[KafkaTopicPartition]) -> None:
        self.paused |= {each.topic for each in partitions}

    def resume(self, partitions: Sequence[KafkaTopicPartition]) -> None:
        self.paused -= {each.topic for each in partitions}

    def _record(self, topic: str) -> SimpleNamespace:
        offset = self.offsets[topic]
        self.offsets[topic] += 1
        values: dict[str, Any] = {"error": None, "topic": topic, "partition": 0, "offset": offset, "key": None}
        values |= {"value": self.value, "headers": None, "leader_epoch": None}
        return SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})


def fetching_from(reader: FakeReader, instance: UnansweredInstance, monkeypatch: pytest.MonkeyPatch) -> Consumer:
    """A consumer that holds the instance's partitions, and reads them by the reader."""
    monkeypatch.setattr(consumer, "time", SimpleNamespace(monotonic=lambda: instance.now, sleep=instance.pass_time))
    fetching = object.__new__(Consumer)
    state: dict[str, Any] = {
        "_stopped": False,
        "_followed": float("inf"),
        "_at_most_once": True,
        "_assigned": instance.held,
        "_instance": instance,
        "_reader": reader,
        "_fetched": FetchBuffer(),
        "_paused": set(),
        "_asked": {},
        "_epochs": LeaderEpochs(),
    }
    vars(fetching).update(state)
    return fetching


def test_a_partition_that_the_log_does_not_promise_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, reader = UnansweredInstance(), FakeReader("silent", "orders")
    fetching = fetching_from(reader, instance, monkeypatch)
    handed_out = 0
    while handed_out < 5 * consumer.BATCH:
        instance.now = 0.0  # Time does not matter here.
        polled: Any = fetching.poll(10.0)
        assert polled.topic() == "orders"
        handed_out += 1
        assert len(fetching._fetched) <= consumer.BATCH
    instance.answers = True
    last: list[str] = []
    while last[-1:] != ["silent"]:
        polled = fetching.poll(10.0)
        last.append(polled.topic())
        assert len(last) <= 2 * consumer.BATCH


def test_a_partition_that_is_lost_while_it_is_paused_is_fetched_once_it_is_gained_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance, reader = UnansweredInstance(), FakeReader("silent", "orders")
    fetching, silent = fetching_from(reader, instance, monkeypatch), TopicPartition("silent", 0)
    reader.incremental_unassign = reader.incremental_assign = lambda partitions: None  # type: ignore[attr-defined]
    fetching._assigned = dict(instance.held)
    while not reader.paused:
        fetching._fetch(0.1, instance.now)
        instance.now = 0.0
    instance.held[silent] = Claim(0)
    fetching._follow_claims()
    assert (reader.paused, fetching._paused) == (set(), set())
    assert fetching._assigned == instance.held


def test_large_records_are_fetched_up_to_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, size = UnansweredInstance(), 500_000
    fetching = fetching_from(FakeReader("silent", "orders", size=size), instance, monkeypatch)
    for _ in range(100):
        fetching._fetch(0.1, instance.now)
        instance.now = 0.0
        assert fetching._fetched.load().size <= consumer.BATCH_BYTES + 2 * size
    assert fetching._fetched.load().size > consumer.BATCH_BYTES / 2
    for tp in instance.held:
        fetching._fetched.forget(tp)
    assert fetching._fetched.load() == (0, 0)


def test_what_a_killed_process_loses_at_most_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records wait for the log's promise in two partitions. However many more there are, no more are fetched."""
    instance = UnansweredInstance()
    reader = FakeReader("silent", "orders")
    monkeypatch.setattr(reader, "pause", lambda partitions: None)  # As records that were on their way.
    fetching = fetching_from(reader, instance, monkeypatch)
    for _ in range(20):
        fetching._fetch(0.1, instance.now)
        assert len(fetching._fetched) <= consumer.BATCH
    assert len(fetching._fetched) == consumer.BATCH
