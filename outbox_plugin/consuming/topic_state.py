"""Asks Kafka where a topic begins and ends, and for its id."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition

from outbox_plugin.adapters.kafka_admin import END_OFFSET, FIRST_OFFSET, KafkaAdmin, offset_of
from outbox_plugin.adapters.kafka_clients import NO_LEADER_YET, UNKNOWN_TOPIC, answer_of, connection_error
from outbox_plugin.core.topic_ranges import TopicState
from outbox_plugin.errors import ServerRefused
from outbox_plugin.settings import Settings

ANSWER_SECONDS = 10.0
RETRY_SECONDS = 0.1


def topic_state(settings: Settings, topic: str, seconds: float = ANSWER_SECONDS) -> TopicState:
    """The topic's id, and each partition's first offset and last stable offset.

    Args:
        settings: where Kafka is.
        topic: its name.
        seconds: how long Kafka's answers may take together.

    Raises:
        LogUnavailable: Kafka does not answer in time.
        ServerRefused: there is no such topic, or we may not read it; or Kafka does not let us in.
    """
    deadline = time.monotonic() + seconds
    with closing(KafkaAdmin(settings)) as admin:
        while True:
            try:
                return _asked(admin, topic, deadline)
            except KafkaException as error:
                code = error.args[0].code()
                if code in UNKNOWN_TOPIC:
                    raise ServerRefused(f"the topic {topic} cannot be read: {error.args[0].str()}") from None
                if code not in NO_LEADER_YET or time.monotonic() > deadline - RETRY_SECONDS:
                    raise connection_error(error.args[0], settings) from error
            except FutureTimeout:
                raise admin.failure(KafkaError(KafkaError._TIMED_OUT)) from None
            time.sleep(RETRY_SECONDS)


def _asked(admin: KafkaAdmin, topic: str, deadline: float) -> TopicState:
    asked = admin.client.describe_topics(TopicCollection([topic]), request_timeout=_left(deadline))
    described = answer_of(asked[topic], _left(deadline))
    partitions = [TopicPartition(topic, each.id) for each in described.partitions]
    ends = admin.ask_for_offsets(partitions, END_OFFSET, _left(deadline))
    firsts = admin.ask_for_offsets(partitions, FIRST_OFFSET, _left(deadline))
    end = {each.partition: offset_of(future, _left(deadline)) for each, future in ends.items()}
    first = {each.partition: offset_of(future, _left(deadline)) for each, future in firsts.items()}
    return TopicState(str(described.topic_id), first, end)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise FutureTimeout
    return left
