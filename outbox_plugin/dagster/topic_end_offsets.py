"""Where topics are, and where they end, which Kafka is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, TypeVar

from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_clients import answer_of, connection_error
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings

Asked = TypeVar("Asked")


def topic_ends(settings: Settings, topics: Sequence[str], deadline: float) -> dict[str, int]:
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
    try:
        with closing(KafkaAdmin(settings)) as admin:
            return _topic_ends(admin.client, topics, deadline)
    except KafkaException as error:
        raise connection_error(error.args[0], settings) from error


def _topic_ends(client: AdminClient, topics: Sequence[str], deadline: float) -> dict[str, int]:
    asked = client.describe_topics(TopicCollection(list(topics)), request_timeout=_left(deadline))
    described = _answers(asked, deadline)
    partitions = [TopicPartition(topic, each.id) for topic, found in described.items() for each in found.partitions]
    if not partitions:
        return {}
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    ends = _answers(
        client.list_offsets(
            dict.fromkeys(partitions, latest),
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=_left(deadline),
        ),
        deadline,
    )
    known = {topic for topic in described if all(tp in ends for tp in partitions if tp.topic == topic)}
    return {topic: sum(end.offset for tp, end in ends.items() if tp.topic == topic) for topic in known}


def _answers(asked: Mapping[Asked, Future[Any]], deadline: float) -> dict[Asked, Any]:
    """The answers that came in time and are no refusals.

    Raises:
        KafkaException: all fail, and one for a reason that is not of the brokers, such as the way to them.
        LogUnavailable: all fail, and one because there was no more time.
    """
    answers: dict[Asked, Any] = {}
    problem: Exception | None = None
    for each, future in asked.items():
        try:
            answers[each] = answer_of(future, max(0.0, deadline - time.monotonic()))
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


def _late() -> LogUnavailable:
    return LogUnavailable("Kafka did not tell in time where the topics end")
