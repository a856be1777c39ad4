"""Names and attributes of spans, by OpenTelemetry's semantic conventions for messaging and for Kafka.

The conventions are in development: https://opentelemetry.io/docs/specs/semconv/messaging/kafka/. The names are written
out here, because the library of conventions has them in a private module.
"""

from __future__ import annotations

from collections.abc import Collection

Attributes = dict[str, str | int | bool]

ERROR_TYPE = "error.type"
BATCH_MESSAGE_COUNT = "messaging.batch.message_count"
CONSUMER_GROUP = "messaging.consumer.group.name"
PARTITION_ID = "messaging.destination.partition.id"
OFFSET = "messaging.kafka.offset"


def span_name(operation: str, topics: Collection[str]) -> str:
    """The operation, and the topic if there is only one."""
    return " ".join((operation, *topics)) if len(topics) == 1 else operation


def operation_attributes(operation: str, topics: Collection[str]) -> Attributes:
    """The attributes of every span of ours. The topic is among them only if all records have the same one."""
    attributes: Attributes = {"messaging.system": "kafka", "messaging.operation.name": operation}
    if operation != "wait":  # The conventions have no type for the operation `wait`.
        attributes["messaging.operation.type"] = operation
    if len(topics) == 1:
        [attributes["messaging.destination.name"]] = topics
    return attributes


def record_attributes(key: str | None, *, is_tombstone: bool) -> Attributes:
    """The attributes of a span of one record; never its value."""
    attributes: Attributes = {} if key is None else {"messaging.kafka.message.key": key}
    if is_tombstone:
        attributes["messaging.kafka.message.tombstone"] = True
    return attributes
