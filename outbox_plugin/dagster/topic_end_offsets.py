"""Asks Kafka where topics end. Also a topic's address, as `kafka://…`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import closing
from itertools import chain
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition

from outbox_plugin.adapters.kafka_admin import END_OFFSET, KafkaAdmin, offset_of
from outbox_plugin.adapters.kafka_clients import answer_of
from outbox_plugin.settings import Settings

# librdkafka returns no broker's answer before the last one's has come, or was waited for. That takes a moment more.
MERGE_SECONDS = 0.3
LEAST_SECONDS = 0.1

K = TypeVar("K")


def topic_ends(settings: Settings, topics: Collection[str], deadline: float) -> dict[str, int]:
    """The end offset of each topic, summed over its partitions; ends by about `deadline`.

    All partitions are asked for at once. A topic is left out that is not there, or one of whose partitions has no
    leader. Offsets count the markers of Kafka's transactions, too.

    Args:
        settings: where Kafka is.
        topics: their names.
        deadline: of `time.monotonic()`, in seconds.

    Raises:
        LogUnavailable: Kafka does not answer in time.
        ServerRefused: it does not let us in.
    """
    with closing(KafkaAdmin(settings)) as admin:
        try:
            return _topic_ends(admin, set(topics), deadline)
        except KafkaException as error:
            raise admin.failure(error.args[0]) from error


def _topic_ends(admin: KafkaAdmin, topics: Collection[str], deadline: float) -> dict[str, int]:
    asked = admin.client.describe_topics(TopicCollection(list(topics)), request_timeout=_left(deadline))
    partitions = {
        topic: [TopicPartition(topic, each.id) for each in found.partitions]
        for topic, found in _answers(asked, deadline).items()
    }
    if not partitions:
        return {}
    timeout = max(LEAST_SECONDS, _left(deadline) - MERGE_SECONDS)
    ends = _answers(admin.ask_for_offsets(chain(*partitions.values()), END_OFFSET, timeout), deadline, offset_of)
    return {
        topic: sum(ends[each] for each in its_own)
        for topic, its_own in partitions.items()
        if all(each in ends for each in its_own)
    }


def _answers(
    asked: Mapping[K, Future[Any]], deadline: float, read: Callable[[Future[Any], float], Any] = answer_of
) -> dict[K, Any]:
    """The answers that came in time and are no refusals, as `read` reads them.

    Raises:
        KafkaException: all fail, and one for a reason that is not of the brokers: the way to them, or the time.
    """
    answers: dict[K, Any] = {}
    problem: KafkaException | None = None
    for each, future in asked.items():
        try:
            answers[each] = read(future, max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            problem = _late()
        except KafkaException as error:  # The library's own codes are negative. A broker that refuses has answered.
            problem = error if error.args[0].code() < 0 else problem
    if problem is not None and not answers:
        raise problem
    return answers


def topic_uri(settings: Settings, topic: str) -> str:
    """The address of a topic: `kafka://`, the brokers by which it is reached, and its name."""
    return f"kafka://{settings.bootstrap_servers}/{topic}"


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _late()
    return left


def _late() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, "it did not tell in time where the topics end"))
