"""Which partitions an inbox has: where it begins to fetch those that it gets, and how it gives them up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.handover import RELEASE_SECONDS
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.pauses import Pauses
from outbox_plugin.inbox.positions import FoundPositions, Positions, find_positions
from outbox_plugin.inbox.reached_positions import ReachedPositions
from outbox_plugin.inbox.rereader import Rereader

ASK_SECONDS = 1.0  # The wait before it asks again for the positions of partitions that were assigned.


class Assignments:
    """The partitions that Kafka has assigned to an inbox. Only the thread that polls may use it."""

    def __init__(
        self,
        consumer: Consumer,
        dispatcher: Dispatcher,
        pauses: Pauses,
        positions: Positions,
        topic_ids: TopicIds,
        reached: ReachedPositions,
        rereader: Rereader,
        stop: threading.Event,
        commit_and_wait: Callable[[dict[TopicPartition, int]], None],
    ) -> None:
        """No partition is assigned yet.

        Args:
            consumer: fetches the partitions.
            dispatcher: has their records that wait for handlers.
            pauses: the partitions that are not fetched for now.
            positions: where the group is, in Postgres.
            topic_ids: of the topics that are consumed.
            reached: the positions that are to be written.
            rereader: expects records from where they are fetched, and begins anew with topics that were recreated.
            stop: an inbox that stops handles no records of new partitions.
            commit_and_wait: commits offsets.
        """
        self._consumer = consumer
        self._dispatcher = dispatcher
        self._pauses = pauses
        self._positions = positions
        self._topic_ids = topic_ids
        self._reached = reached
        self._rereader = rereader
        self._stop = stop
        self._commit_and_wait = commit_and_wait
        self._without_position: set[TopicPartition] = set()
        self._ask_at = 0.0

    @property
    def all_have_positions(self) -> bool:
        """Whether all partitions that were assigned are fetched."""
        return not self._without_position

    def assigned(self, partitions: list[KafkaTopicPartition]) -> None:
        """Fetch the partitions from where the group is, as far as that is known."""
        assigned = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._start_at(assigned, self._find_positions(assigned))

    def start_waiting(self) -> None:
        """Ask again for the positions of partitions that wait; slow answers take at most a fifth of the time."""
        began = time.monotonic()
        if not self._without_position or began < self._ask_at:
            return
        found = self._find_positions(self._without_position)
        ended, others_flow = time.monotonic(), bool(self._dispatcher.locked(KeyQueues.partitions))
        self._ask_at = ended + max(ASK_SECONDS, 4 * (ended - began) if others_flow else 0.0)
        if found:
            self._without_position.difference_update(found)
            self._unassign([KafkaTopicPartition(*tp) for tp in found])
            self._start_at(found, found)

    def revoked(self, partitions: list[KafkaTopicPartition]) -> None:
        """Give the partitions up when their handlers have ended, and commit what is done."""
        self._commit_and_wait(self._give_up(partitions, RELEASE_SECONDS))
        self._unassign(partitions)

    def lost(self, partitions: list[KafkaTopicPartition]) -> None:
        """Give the partitions up, which others may have by now."""
        self._give_up(partitions, 0)
        self._unassign(partitions)

    def _find_positions(self, partitions: Collection[TopicPartition]) -> FoundPositions:
        def look_up(topics: Collection[str]) -> dict[str, str]:
            answer = self._topic_ids.look_up(topics)
            self._rereader.restart(answer.recreated)  # Only partitions that are ours already.
            return {topic: self._topic_ids.of(topic) for topic in answer.known}

        found = {} if self._stop.is_set() else find_positions(self._positions, self._consumer, partitions, look_up)
        return {} if self._stop.is_set() else found  # An inbox that stops must handle none of their records.

    def _start_at(self, partitions: Collection[TopicPartition], found: FoundPositions) -> None:
        """Fetch partitions from the positions that were found. The other partitions wait, paused, for theirs."""
        offsets = []
        for tp in partitions:
            # Not from Kafka's own offset, which may be of an older topic.
            first = self._rereader.start(tp, found.get(tp))
            beginning = OFFSET_BEGINNING if tp in found else OFFSET_END
            offsets.append(KafkaTopicPartition(*tp, beginning if first is None else first))
        topic_ids, next_offsets = self._topic_ids.known(), {tp: at.next_offset for tp, at in found.items() if at}
        self._dispatcher.locked(lambda queues: queues.assign(found, topic_ids, next_offsets))
        self._consumer.incremental_assign(offsets)
        self._without_position.update(tp for tp in partitions if tp not in found)
        self._pauses.pause(self._consumer, self._without_position)

    def _give_up(self, partitions: list[KafkaTopicPartition], patience_seconds: float) -> dict[TopicPartition, int]:
        given_up = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._without_position.difference_update(given_up)
        reached = self._dispatcher.release(given_up, patience_seconds)
        self._reached.note(self._dispatcher.locked(KeyQueues.positions))
        return reached

    def _unassign(self, partitions: list[KafkaTopicPartition]) -> None:
        """Fetch the partitions no more. librdkafka keeps a pause beyond an assignment, so it is ended before."""
        self._pauses.resume(self._consumer, {TopicPartition(each.topic, each.partition) for each in partitions})
        self._consumer.incremental_unassign(partitions)
