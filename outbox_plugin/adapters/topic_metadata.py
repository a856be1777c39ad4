"""Looks up a topic's metadata, also where one of several brokers does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import ClusterMetadata, TopicMetadata

from outbox_plugin.adapters.kafka_clients import REQUEST_TIMEOUT_SECONDS

# A client asks any broker that it is connected to. Where that one is stopped, the next attempt may ask another. Each
# attempt lasts longer than the one before it, as all brokers may be slow.
ATTEMPT_SECONDS = 2.0
NO_ANSWER = {KafkaError._TIMED_OUT, KafkaError._TRANSPORT}


def look_up_topic(
    client: Producer | Consumer, topic: str, should_wait: Callable[[], bool] = lambda: True
) -> TopicMetadata | None:
    """The topic's metadata; None if the answer lacks the topic.

    Args:
        client: any client of the brokers.
        topic: its name.
        should_wait: returns whether waiting still makes sense; called after each attempt.

    Raises:
        KafkaException: Kafka does not answer, or refuses to.
    """
    return _look_up(client, topic, should_wait).topics.get(topic)


def look_up_all_topics(
    client: Producer | Consumer, should_wait: Callable[[], bool] = lambda: True
) -> dict[str, TopicMetadata]:
    """The metadata of all topics that we may see.

    Args:
        client: any client of the brokers.
        should_wait: returns whether waiting still makes sense; called after each attempt.

    Raises:
        KafkaException: Kafka does not answer, or refuses to.
    """
    return _look_up(client, None, should_wait).topics


def _look_up(client: Producer | Consumer, topic: str | None, should_wait: Callable[[], bool]) -> ClusterMetadata:
    """The metadata of one topic, or of all."""
    began = time.monotonic()
    deadline = began + REQUEST_TIMEOUT_SECONDS
    while True:
        try:
            timeout = attempt_seconds(began, deadline)
            found: ClusterMetadata = (
                client.list_topics(timeout=timeout) if topic is None else client.list_topics(topic, timeout=timeout)
            )
            return found
        except KafkaException as error:
            if error.args[0].code() not in NO_ANSWER or time.monotonic() >= deadline or not should_wait():
                raise


def attempt_seconds(began: float, deadline: float) -> float:
    """How long the next attempt may take.

    Args:
        began: when the first one began, a time of `time.monotonic()`.
        deadline: when all of them end.
    """
    now = time.monotonic()
    return max(0.1, min(ATTEMPT_SECONDS + now - began, deadline - now))
