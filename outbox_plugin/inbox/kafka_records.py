"""Converts between confluent_kafka's objects and the inbox's: records, and positions with leader epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from confluent_kafka import Message
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.kafka_clients import readable_headers
from outbox_plugin.core.event_identity import event_identity
from outbox_plugin.core.leader_epochs import GroupPosition
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.received import Received

_UNKNOWN_EPOCH = -1


def received_from(message: Message, topic_id: Callable[[str], str]) -> Received:
    """Convert a polled record.

    Args:
        message: the record; it must not stand for an error.
        topic_id: returns the id of a topic. With partition, offset and leader epoch it names a record that no header
            names: after a truncation, the record at that offset has another epoch.
    """
    polled: Any = message  # The stubs call these optional; a record has them.
    topic, partition, offset, epoch = polled.topic(), polled.partition(), polled.offset(), polled.leader_epoch()
    found = readable_headers(message)
    headers = tuple(cast(Any, found) or ())
    known = event_identity(headers, "")
    record = Received(
        topic,
        partition,
        offset,
        polled.timestamp()[1],
        polled.key(),
        polled.value(),
        headers,
        known.key,
        unreadable_headers=found is None,
        leader_epoch=epoch,
    )
    if not known.named:
        by_name, by_id = f"{topic}/{partition}/{offset}", f"{topic_id(topic)}/{partition}/{offset}"
        record.formerly = (by_name,) if epoch is None else (by_name, by_id)
        if not known.placed:
            record.named_by_place = True
            record.idempotency_key = by_id if epoch is None else f"{by_id}/{epoch}"
    return record


def committed_offset(tp: TopicPartition, position: GroupPosition, topic_id: str) -> KafkaTopicPartition:
    """Convert a position to a committed offset.

    It has the topic's id as metadata and the leader epoch, because the offset means nothing in a topic that was
    recreated, or in a partition that was truncated.

    Args:
        tp: the partition.
        position: where to go on.
        topic_id: of the topic as it is now.
    """
    epoch = _UNKNOWN_EPOCH if position.leader_epoch is None else position.leader_epoch
    return KafkaTopicPartition(*tp, position.next_offset, topic_id, epoch)
