"""Where topics end: one that cannot be told hides no other one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition

from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_clients import connection_error
from outbox_plugin.dagster import topic_end_offsets
from outbox_plugin.dagster.topic_end_offsets import topic_ends
from outbox_plugin.errors import LogUnavailable, OutboxError, ServerRefused
from tests.clock import SimulatedTime

SETTINGS = Settings(dsn="postgresql://app@127.0.0.1:1/shop", bootstrap_servers="127.0.0.1:1")
TWO = {"orders": 2, "stock": 3}  # Topics, and how many partitions they have.


def answered(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, KafkaError):
        future.set_exception(KafkaException(value))
    elif value is not None:
        future.set_result(value)
    return future


class Brokers:
    """Answers as an admin client does. A partition ends at 10, unless it has another answer; None is no answer."""

    def __init__(self, topics: Mapping[str, int], answers: Mapping[tuple[str, int], Any]) -> None:
        self._topics = topics
        self._answers = answers
        self.client = self

    def describe_topics(self, topics: TopicCollection, *, request_timeout: float) -> dict[str, Future[Any]]:
        assert request_timeout > 0
        assert len(set(topics.topic_names)) == len(topics.topic_names), "confluent_kafka refuses a name given twice"
        unknown = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return {
            name: answered(
                SimpleNamespace(partitions=[SimpleNamespace(id=number) for number in range(self._topics[name])])
                if name in self._topics
                else self._answers.get((name, -1), unknown)
            )
            for name in topics.topic_names
        }

    def ask_for_offsets(self, asked: Iterable[TopicPartition], *_: object) -> dict[TopicPartition, Future[Any]]:
        ten = SimpleNamespace(offset=10)
        return {each: answered(self._answers.get((each.topic, each.partition), ten)) for each in asked}

    def failure(self, error: KafkaError) -> OutboxError:
        return connection_error(error, SETTINGS)

    def close(self) -> None: ...


def ends(
    patch: pytest.MonkeyPatch, topics: Mapping[str, int], answers: Mapping[tuple[str, int], Any], *more: str
) -> dict[str, int]:
    """Where the topics end. The deadline does not come near while brokers answer, however slow this machine is."""
    patch.setattr(topic_end_offsets, "KafkaAdmin", lambda _: Brokers(topics, answers))
    patch.setattr(topic_end_offsets, "time", clock := SimulatedTime())
    return topic_ends(SETTINGS, [*topics, *more], clock.monotonic() + 0.2)


def test_the_ends_of_all_partitions_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, TWO, {}) == {"orders": 20, "stock": 30}


@pytest.mark.parametrize(
    "answer",
    [
        KafkaError(KafkaError.LEADER_NOT_AVAILABLE),
        KafkaError(KafkaError._TIMED_OUT),
        None,
        SimpleNamespace(offset=-1001),  # As librdkafka has it where one broker of several is silent.
    ],
)
def test_a_partition_without_a_leader_hides_its_topic_alone(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    assert ends(monkeypatch, TWO, {("stock", 1): answer}) == {"orders": 20}


def test_a_topic_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, TWO, {}, "returns") == {"orders": 20, "stock": 30}
    assert ends(monkeypatch, {}, {}, "returns") == {}


def test_where_no_answer_comes_kafka_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LogUnavailable, match="did not tell in time"):
        ends(monkeypatch, {"orders": 1}, {("orders", 0): None})
    with pytest.raises(LogUnavailable, match="127"):
        ends(monkeypatch, {}, {("orders", -1): KafkaError(KafkaError._TRANSPORT)}, "orders")


def test_a_name_may_be_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, TWO, {}, "stock") == {"orders": 20, "stock": 30}


def test_who_is_not_let_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerRefused):
        ends(monkeypatch, {}, {("orders", -1): KafkaError(KafkaError._AUTHENTICATION)}, "orders")
