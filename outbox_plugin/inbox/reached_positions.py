"""The positions that an inbox has reached, which are to be written to Postgres."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.leader_epochs import GroupPosition, LeaderEpochs
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.key_queues import OffsetInTopic
from outbox_plugin.inbox.positions import PartitionPositions, PositionInTopic, Positions


class ReachedPositions:
    """Notes the positions, and writes them. Only the thread that polls may use it, but for `all`."""

    def __init__(self, positions: Positions, topic_ids: TopicIds, epochs: LeaderEpochs) -> None:
        """Nothing is reached yet.

        Args:
            positions: where they are written.
            topic_ids: of the topics that are consumed.
            epochs: which leader wrote the records, as far as they were read.
        """
        self._positions = positions
        self._topic_ids = topic_ids
        self._epochs = epochs
        self._reached: PartitionPositions = {}  # Replaced, never changed: housekeeping writes it.

    def all(self) -> PartitionPositions:
        """What is to be written now."""
        return self._reached

    def note(self, positions: Mapping[TopicPartition, OffsetInTopic]) -> None:
        """Note which positions are to be written, with their epochs, which only the thread that polls knows."""
        self._reached = {
            tp: PositionInTopic(at.topic_id, self._epochs.position(tp, at.next_offset))
            for tp, at in positions.items()
            if self._epochs.follows_a_record(tp, at.next_offset)
        }

    def keep(self, tp: TopicPartition, position: GroupPosition) -> bool:
        """Write a position before the partition is read again, so that old records are left out after a restart, too.

        Returns False if the database is away.
        """
        self._reached = {**self._reached, tp: PositionInTopic(self._topic_ids.of(tp.topic), position)}
        return self.write()

    def write(self) -> bool:
        """Write all positions now. Returns False if the database is away."""
        return self._positions.write_now(self.all)
