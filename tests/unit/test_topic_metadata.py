"""Topics are looked up in attempts, of which one is long enough for a slow broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_plugin.adapters import kafka_reader, topic_metadata
from outbox_plugin.adapters.kafka_reader import bounds
from outbox_plugin.adapters.topic_metadata import look_up_topic
from tests.clock import SimulatedTime

ANSWER_SECONDS = 0.3
CLOCK = SimulatedTime()


@pytest.fixture(autouse=True)
def _time_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kafka_reader, topic_metadata):
        monkeypatch.setattr(module, "time", CLOCK)


class SlowClient:
    """Gets each answer after the same time."""

    def __init__(self) -> None:
        self.attempts = 0

    def list_topics(self, topic: str, timeout: float) -> Any:
        self._wait(timeout)
        return SimpleNamespace(topics={topic: "metadata"})

    def get_watermark_offsets(self, _: TopicPartition, timeout: float) -> tuple[int, int]:
        self._wait(timeout)
        return 3, 17

    def _wait(self, timeout: float) -> None:
        self.attempts += 1
        CLOCK.sleep(min(timeout, ANSWER_SECONDS))
        if timeout < ANSWER_SECONDS:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


def test_brokers_that_answer_slowly_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_metadata, "ATTEMPT_SECONDS", 0.12)
    monkeypatch.setattr(topic_metadata, "REQUEST_TIMEOUT_SECONDS", 3.0)
    client: Any = SlowClient()
    assert look_up_topic(client, "orders") == cast(Any, "metadata")
    assert bounds(client, TopicPartition("orders", 0), 3.0) == (3, 17)
    assert client.attempts == 6  # Of each call, the third one lasts long enough.


def test_a_stop_is_noticed_after_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_metadata, "ATTEMPT_SECONDS", 0.12)
    client: Any = SlowClient()
    with pytest.raises(KafkaException):
        look_up_topic(client, "orders", lambda: False)
    assert client.attempts == 1
