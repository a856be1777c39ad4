"""Converts between confluent_kafka's objects and the inbox's: records, and positions with leader epochs."""

from __future__ import annotations

from typing import Any, cast

from confluent_kafka import Message
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.kafka_clients import readable_headers
from outbox_plugin.core.event_identity import event_identity
from outbox_plugin.core.leader_epochs import GroupPosition
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.received import Received

_UNKNOWN_EPOCH = -1


def received_from(message: Message, topic_id: str) -> Received:
    """Convert a polled record.

    Args:
        message: the record; it must not stand for an error.
        topic_id: the id of its topic. With partition, offset and leader epoch it names a record that no header names:
            after a cut, the record at that offset has another epoch.
    """
    polled: Any = message  # The stubs call these optional; a record has them.
    topic, partition, offset, epoch = polled.topic(), polled.partition(), polled.offset(), polled.leader_epoch()
    found = readable_headers(message)
    headers = tuple(cast(Any, found) or ())
    by_name, by_id = f"{topic}/{partition}/{offset}", f"{topic_id}/{partition}/{offset}"
    known = event_identity(headers, by_id if epoch is None else f"{by_id}/{epoch}")
    former = (by_name,) if epoch is None else (by_name, by_id)
    return Received(
        topic,
        partition,
        offset,
        polled.timestamp()[1],
        polled.key(),
        polled.value(),
        headers,
        known.key,
        formerly=() if known.named else former,
        unreadable_headers=found is None,
        named_by_place=not (known.named or known.placed),
        leader_epoch=epoch,
    )


def committed_offset(tp: TopicPartition, position: GroupPosition, topic_id: str) -> KafkaTopicPartition:
    """Convert a position to a committed offset.

    It has the topic's id as metadata and the leader epoch, because the offset means nothing in a topic that was
    recreated, or in a partition that was cut.

    Args:
        tp: the partition.
        position: where to go on.
        topic_id: of the topic as it is now.
    """
    epoch = _UNKNOWN_EPOCH if position.leader_epoch is None else position.leader_epoch
    return KafkaTopicPartition(*tp, position.next_offset, topic_id, epoch)
