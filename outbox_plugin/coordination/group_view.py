"""One group's view of the log: who holds its partitions, and where it goes on in them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outbox_plugin.coordination.log_view import LogView
from outbox_plugin.coordination.messages import coordination_partition
from outbox_plugin.coordination.partition_owners import Holder
from outbox_plugin.core.topic_partition import TopicPartition


class TopicForm(NamedTuple):
    """A consumed topic, as the broker describes it."""

    partitions: int
    topic_id: str


class GroupView(LogView):
    """The worlds of a group's coordination partitions, seen as one. `now` is monotonic seconds everywhere."""

    def __init__(
        self,
        group_id: str,
        topics: Sequence[str],
        interval_seconds: float,
        *,
        width: int,
        since: float,
        log_ahead: float,
    ) -> None:
        """Begin with an empty log.

        Args:
            group_id: the group.
            topics: what it consumes.
            interval_seconds: the heartbeat interval of the group.
            width: the partitions of the coordination topic that count.
            since: when the part of the log that is read begins (seconds since the epoch).
            log_ahead: the log's time, in seconds since the epoch, minus the monotonic time.
        """
        self.group_id = group_id
        self._log_ahead = log_ahead
        self._partition_of = {topic: coordination_partition(topic, width) for topic in topics}
        super().__init__(self._partition_of.values(), interval_seconds, width=width, since=since)
        self.forms: dict[str, TopicForm] = {}

    def partitions(self) -> list[TopicPartition]:
        """All partitions that the group consumes."""
        return [
            TopicPartition(topic, number) for topic, form in self.forms.items() for number in range(form.partitions)
        ]

    def coordination_partition(self, topic: str) -> int:
        """The partition of the coordination topic in which a consumed topic is coordinated."""
        return self._partition_of[topic]

    def is_about(self, partition: int, topic: str) -> bool:
        """Whether that partition of the coordination topic is about `topic`, and the group consumes the topic."""
        return self._partition_of.get(topic) == partition

    def log_time(self, now: float) -> float:
        """The log's own time, in seconds since the epoch."""
        return now + self._log_ahead

    def set_log_time(self, log_time: float, now: float) -> None:
        """Note that the log's time is `log_time` at `now`."""
        self._log_ahead = log_time - now

    def owner(self, tp: TopicPartition, now: float) -> Holder | None:
        """The instance that holds the partition; None if it is free."""
        return self.world_of(tp.topic).owner(self.group_id, *tp, self.log_time(now))

    def latest_holder(self, tp: TopicPartition) -> Holder | None:
        """The instance that holds the partition or has become stale in it; None after a release or a pause."""
        return self.world_of(tp.topic).latest_holder(self.group_id, *tp)

    def left_by(self, tp: TopicPartition) -> Holder | None:
        """The instance that released a free partition itself."""
        return self.world_of(tp.topic).left_by(self.group_id, *tp)

    def knows(self, tp: TopicPartition) -> bool:
        """Whether the log has an offset for the partition."""
        return self.world_of(tp.topic).offset(self.group_id, *tp) is not None

    def start_of(self, tp: TopicPartition) -> int:
        """The offset at which the group goes on; 0, the partition's first record, if the log has none."""
        return self.world_of(tp.topic).offset(self.group_id, *tp) or 0

    def topic_ids(self, tp: TopicPartition) -> tuple[str, ...]:
        """The ids of the topic that the offset belongs to and of those before it; empty if the log has none."""
        return self.world_of(tp.topic).topic_ids(self.group_id, *tp)

    def topic_id(self, tp: TopicPartition) -> str:
        """The id of the topic that the offset belongs to; empty if the log has none."""
        return next(iter(self.topic_ids(tp)), "")

    def topic_id_is_current(self, tp: TopicPartition) -> bool:
        """Whether the offset belongs to the topic that the brokers describe, as far as the log knows."""
        form = self.forms.get(tp.topic)
        return form is not None and self.topic_id(tp) in ("", form.topic_id)

    def is_paused(self, now: float) -> bool:
        """Whether an operator has paused the group."""
        return any(world.paused(self.group_id, self.log_time(now)) for world in self.worlds.values())

    def members(self, now: float) -> dict[Holder, bool]:
        """The group's live instances, and whether each has lately asked for more partitions."""
        members: dict[Holder, bool] = {}
        for world in self.worlds.values():
            for holder, asks in world.members(self.group_id, self.log_time(now)).items():
                members[holder] = members.get(holder, False) or asks
        return members
