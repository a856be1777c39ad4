"""Pauses partitions that hold too much of the memory, or that wait for their positions.

Only the thread that polls may use it, but for `count`.
"""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.core.memory_limit import MemoryLimit
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.key_queues import KeyQueues


class Pauses:
    """The partitions of a consumer that are paused."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        """Begin without pauses; `dispatcher` holds the records."""
        self._dispatcher = dispatcher
        self._paused: frozenset[TopicPartition] = frozenset()  # Replaced, never changed: other threads count it.

    @property
    def count(self) -> int:
        """How many partitions are paused. Any thread may ask."""
        return len(self._paused)

    def update(self, consumer: Consumer, limit: MemoryLimit, patience_seconds: float) -> None:
        """Resume partitions that hold little, and pause those that hold too much.

        Args:
            consumer: has the partitions.
            limit: decides which those are.
            patience_seconds: how long to wait for handlers to make room, because a pause drops what librdkafka has
                fetched ahead.
        """

        def to_pause(queues: KeyQueues) -> set[TopicPartition]:
            held = queues.load()
            return set() if limit.is_half_free(held) else limit.to_pause(held, queues.loads()) - self._paused

        if self._paused:
            self.resume(
                consumer, self._dispatcher.locked(lambda queues: limit.to_resume(queues.load(), queues.loads()))
            )
        if self._dispatcher.wait_until(lambda queues: not to_pause(queues), patience_seconds):
            return
        self.pause(consumer, self._dispatcher.locked(to_pause))

    def pause(self, consumer: Consumer, partitions: Collection[TopicPartition]) -> None:
        """Pause partitions. Those of which the dispatcher knows nothing stay paused until `resume`."""
        if partitions:
            self._paused = self._paused.union(partitions)
            consumer.pause([KafkaTopicPartition(*tp) for tp in partitions])

    def resume(self, consumer: Consumer, partitions: Collection[TopicPartition]) -> None:
        """Resume those of the partitions that are paused."""
        if resumed := self._paused.intersection(partitions):
            self._paused -= resumed
            consumer.resume([KafkaTopicPartition(*tp) for tp in resumed])
