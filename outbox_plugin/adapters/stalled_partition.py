"""Why a partition of a topic of our own takes no records. Topics of events: see `writable_topics`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from confluent_kafka import KafkaException, Producer

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.topic_metadata import look_up_topic
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings


def why_stalled(
    producer: Producer, settings: Settings, topic: str, partition: int, should_wait: Callable[[], bool]
) -> str | None:
    """Why the partition takes no records now; None if it may take them, or if Kafka does not say.

    Args:
        producer: any client of the same brokers.
        settings: which Kafka.
        topic: one of the group's own, whose configuration a harvester may read.
        partition: its number.
        should_wait: returns whether waiting for an answer still makes sense; called now and then.
    """
    try:
        metadata = look_up_topic(producer, topic, should_wait)
    except KafkaException:
        return None
    found = None if metadata is None else metadata.partitions.get(partition)
    if found is None:
        return None
    if found.leader < 0:
        return f"no broker leads partition {partition} now"
    if len(found.isrs) == len(found.replicas) or not should_wait():
        return None
    try:
        with closing(KafkaAdmin(settings)) as admin:
            least = admin.least_in_sync(topic, should_wait)
    except LogUnavailable:  # There is no token for Kafka.
        return None
    if least is None or len(found.isrs) >= least:
        return None
    return f"partition {partition} has {len(found.isrs)} replica(s) in sync, and its min.insync.replicas is {least}"
