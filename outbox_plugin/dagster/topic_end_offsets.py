"""Where topics are, and where they end, which Kafka is asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka_clients import client_config, connection_error
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings


def topic_ends(settings: Settings, topics: Sequence[str], deadline: float) -> dict[str, int]:
    """The end offset of each topic that is there, summed over its partitions; ends by about `deadline`.

    Offsets count the markers of Kafka's transactions, too.

    Args:
        settings: where Kafka is.
        topics: their names.
        deadline: of `time.monotonic()`, in seconds.

    Raises:
        LogUnavailable: Kafka does not answer in time.
        ServerRefused: it does not let us in.
    """
    config = client_config(settings, group_id=f"{settings.group}-status", enable_auto_commit=False)
    ends = {}
    try:
        with closing(Consumer(config)) as consumer:
            for topic in topics:
                found = consumer.list_topics(topic, timeout=_left(deadline)).topics[topic]
                if found.error is None:
                    ends[topic] = sum(
                        consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=_left(deadline))[1]
                        for partition in found.partitions
                    )
    except KafkaException as error:
        raise connection_error(error.args[0], settings) from error
    return ends


def topic_uri(settings: Settings, topic: str) -> str:
    """The address of a topic: `kafka://`, the brokers by which it is reached, and its name."""
    return f"kafka://{settings.bootstrap_servers}/{topic}"


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise LogUnavailable("Kafka did not tell in time where the topics end")
    return left
