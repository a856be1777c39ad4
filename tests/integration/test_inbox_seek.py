"""librdkafka refuses to seek in a partition that it has not begun to fetch, or that was given up."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from confluent_kafka import OFFSET_END, Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin import Settings
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.leader_epochs import LeaderEpochs
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.consumer_config import consumer_config
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.positions import Positions
from outbox_plugin.inbox.reached_positions import ReachedPositions
from outbox_plugin.inbox.rereader import Rereader
from outbox_plugin.inbox.unread_deletions import UnreadDeletions
from tests.harvesting import create_topic
from tests.inbox_support import produce
from tests.support import eventually

pytestmark = pytest.mark.integration

SOON = 60.0


class SlowToFetch:
    """A consumer that has not begun to fetch when it is told to seek."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.refused = 0

    def incremental_assign(self, partitions: list[KafkaTopicPartition]) -> None:
        self._consumer.incremental_assign(partitions)

    def incremental_unassign(self, partitions: list[KafkaTopicPartition]) -> None:
        self._consumer.incremental_unassign(partitions)

    def seek(self, at: KafkaTopicPartition) -> None:
        """Seek straight after the partition is assigned, until librdkafka refuses that."""
        while True:
            self._consumer.incremental_assign([KafkaTopicPartition(at.topic, at.partition, OFFSET_END)])
            try:
                self._consumer.seek(at)
            except KafkaException:
                self.refused += 1
                raise
            self._consumer.incremental_unassign([at])


def test_a_topic_that_was_recreated_is_read_from_its_beginning_though_it_has_just_been_assigned(
    settings: Settings, group: str
) -> None:
    topic = create_topic(settings, f"{group}-events", 1)
    produce(settings, topic, [("key", f"{number}") for number in range(5)])
    dispatcher, epochs, stop = Dispatcher(1), LeaderEpochs(), threading.Event()
    positions = Positions(settings, group)
    tp = TopicPartition(topic, 0)
    found: list[int | None] = []
    with (
        closing(Consumer(consumer_config(settings, group))) as consumer,
        closing(TopicIds(settings)) as topic_ids,
    ):
        slow = SlowToFetch(consumer)
        reached = ReachedPositions(positions, topic_ids, epochs)
        unread = UnreadDeletions(lambda _: 0)
        rereader = Rereader(slow, dispatcher, topic_ids, epochs, reached, unread, stop)  # type: ignore[arg-type]
        dispatcher.locked(lambda queues: queues.assign([tp]))
        rereader.restart({topic})
        assert slow.refused == 1

        def polled() -> bool:
            found.extend(each.offset() for each in consumer.consume(10, 0.1) if each.error() is None)
            return len(found) >= 5

        eventually(polled, SOON)
        assert found == [*range(5)]
        dispatcher.locked(lambda queues: queues.revoke([tp]))
        consumer.incremental_unassign([KafkaTopicPartition(*tp)])
        rereader._consumer = consumer
        rereader._seek(tp, 0)  # It belongs to another inbox, perhaps.
        assert consumer.assignment() == []
