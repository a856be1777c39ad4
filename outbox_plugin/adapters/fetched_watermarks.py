"""Where a partition began, and where it ended, when a consumer last fetched it."""

from __future__ import annotations

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.core.topic_partition import TopicPartition


def fetched_watermarks(consumer: Consumer, tp: TopicPartition) -> tuple[int, int]:
    """Return where a partition began, and where it ended, when `consumer` last fetched it.

    It asks no broker: each answer to a fetch has the watermarks. Both are negative where the client does not know the
    partition.
    """
    try:
        low, high = consumer.get_watermark_offsets(KafkaTopicPartition(*tp), cached=True)
    except KafkaException:
        return OFFSET_INVALID, OFFSET_INVALID
    return low, high
