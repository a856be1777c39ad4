"""Why partitions take no records, so that a transaction cannot go on, or cannot end.

Topics of events that are being written to: see `writable_topics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import chain, islice

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import PartitionMetadata, TopicMetadata

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.topic_metadata import look_up_all_topics, look_up_topic
from outbox_plugin.core.coordinator_partition import TRANSACTION_STATE_TOPIC, coordinator_partition
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings

_NAMED = 5  # So many partitions are named at most.


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
    found = _partitions(producer, topic, should_wait).get(partition)
    return None if found is None else _why(found, _least_in_sync(found, settings, topic, should_wait))


def why_without_coordinator(
    producer: Producer,
    settings: Settings,
    transactional_id: str,
    should_wait: Callable[[], bool],
    *,
    is_suspect: bool,
) -> str | None:
    """Why no broker coordinates the transactions of an id now; None if one may, or if Kafka does not say.

    Args:
        producer: any client of the same brokers.
        settings: which Kafka.
        transactional_id: the id.
        should_wait: returns whether waiting for an answer still makes sense; called now and then.
        is_suspect: whether no coordinator has answered. Then a replica that is out of sync is a reason, too, where we
            may not read how many must be in sync.
    """
    partitions = _partitions(producer, TRANSACTION_STATE_TOPIC, should_wait)
    if not partitions:
        return None
    found = partitions.get(coordinator_partition(transactional_id, len(partitions)))
    if found is None:
        return None
    least = _least_in_sync(found, settings, TRANSACTION_STATE_TOPIC, should_wait)
    reason = _why(found, least)
    if reason is None and least is None and is_suspect and not _has_all_in_sync(found):
        in_sync = f"{len(found.isrs)} of {len(found.replicas)} replicas in sync"
        reason = f"partition {found.id} has {in_sync}, and its min.insync.replicas may ask for more"
    return reason and (
        f"no broker coordinates the transactions of {transactional_id}, because the topic {TRANSACTION_STATE_TOPIC} "
        f"takes no records: {reason}"
    )


def which_stalled(
    producer: Producer, settings: Settings, is_meant: Callable[[str], bool], should_wait: Callable[[], bool]
) -> str | None:
    """Some partitions that take no records now, with the reasons; None if Kafka names none.

    Those without a leader come first. Those with too few replicas in sync are named where we may read how many must be.

    Args:
        producer: any client of the same brokers.
        settings: which Kafka.
        is_meant: returns whether a topic is of interest.
        should_wait: returns whether waiting for an answer still makes sense; called now and then.
    """
    try:
        topics = look_up_all_topics(producer, should_wait)
    except KafkaException:
        return None
    stalled = list(
        islice(
            chain(_without_leader(topics, is_meant), _out_of_sync(topics, settings, is_meant, should_wait)), _NAMED + 1
        )
    )
    return "; ".join([*stalled[:_NAMED], *(["and others"] if len(stalled) > _NAMED else [])]) or None


def _without_leader(topics: Mapping[str, TopicMetadata], is_meant: Callable[[str], bool]) -> Iterator[str]:
    for topic, metadata in sorted(topics.items()):
        leaderless = [each for each in metadata.partitions.values() if each.leader < 0]
        if leaderless and is_meant(topic):
            yield from (f"topic {topic}: {_why(each, None)}" for each in leaderless)


def _out_of_sync(
    topics: Mapping[str, TopicMetadata],
    settings: Settings,
    is_meant: Callable[[str], bool],
    should_wait: Callable[[], bool],
) -> Iterator[str]:
    """Those that have a leader, and too few replicas in sync, one by one: each topic takes a request."""
    with suppress(LogUnavailable), closing(KafkaAdmin(settings)) as admin:  # There may be no token for Kafka.
        for topic, metadata in sorted(topics.items()):
            led = [each for each in metadata.partitions.values() if each.leader >= 0 and not _has_all_in_sync(each)]
            if led and should_wait() and is_meant(topic):
                least = admin.least_in_sync(topic, should_wait)
                reasons = (_why(each, least) for each in led)
                yield from (f"topic {topic}: {reason}" for reason in reasons if reason is not None)


def _partitions(producer: Producer, topic: str, should_wait: Callable[[], bool]) -> Mapping[int, PartitionMetadata]:
    """The topic's partitions, by number; none if Kafka does not say."""
    try:
        metadata = look_up_topic(producer, topic, should_wait)
    except KafkaException:
        return {}
    return {} if metadata is None else metadata.partitions


def _least_in_sync(
    found: PartitionMetadata, settings: Settings, topic: str, should_wait: Callable[[], bool]
) -> int | None:
    """How many replicas must be in sync; None if that does not matter to the partition, or if Kafka does not say."""
    if found.leader < 0 or _has_all_in_sync(found) or not should_wait():
        return None
    try:
        with closing(KafkaAdmin(settings)) as admin:
            return admin.least_in_sync(topic, should_wait)
    except LogUnavailable:  # There is no token for Kafka.
        return None


def _has_all_in_sync(found: PartitionMetadata) -> bool:
    return len(found.isrs) == len(found.replicas)


def _why(found: PartitionMetadata, least_in_sync: int | None) -> str | None:
    """Why the partition takes no records; None if it may take them."""
    if found.leader < 0:
        return f"no broker leads partition {found.id} now"
    if _has_all_in_sync(found) or least_in_sync is None or len(found.isrs) >= least_in_sync:
        return None
    in_sync = f"{len(found.isrs)} replica(s) in sync"
    return f"partition {found.id} has {in_sync}, and its min.insync.replicas is {least_in_sync}"
