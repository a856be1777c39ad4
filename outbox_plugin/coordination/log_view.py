"""What was read of several partitions of the coordination topic: a world for each of them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from outbox_plugin.coordination.messages import coordination_partition
from outbox_plugin.coordination.partition_owners import Key, World
from outbox_plugin.coordination.state_topic import KeptState


class LogView:
    """The worlds of some partitions of the coordination topic: what is kept beside the log, and what is read of it."""

    def __init__(self, partitions: Iterable[int], interval_seconds: float, *, width: int, since: float) -> None:
        """Begin with an empty log.

        Args:
            partitions: those of the coordination topic that are read.
            interval_seconds: the heartbeat interval of the groups.
            width: the partitions of the coordination topic that count.
            since: when the part of the log that is read begins (seconds since the epoch).
        """
        self._width = width
        self.worlds = {each: World(interval_seconds, since=since) for each in partitions}
        self._latest = dict.fromkeys(self.worlds, float("-inf"))
        self._remembered: dict[Key, float] = {}  # The times of the positions that were kept when we began.

    def coordination_partition(self, topic: str) -> int:
        """The partition of the coordination topic in which `topic` is coordinated."""
        return coordination_partition(topic, self._width)

    def world_of(self, topic: str) -> World:
        """The world in which `topic` is coordinated."""
        return self.worlds[self.coordination_partition(topic)]

    def begin_with(self, kept: KeptState) -> None:
        """Take in what is kept beside the log, before the log is read."""
        for pause in kept.pauses.values():
            for world in self.worlds.values():
                world.remember_pause(pause)
        for key, position in kept.positions.items():
            self.remember(key, position.offset, position.topic_ids, position.at)

    def remember(self, key: Key, offset: int, topic_ids: tuple[str, ...], at: float) -> None:
        """Take in a position that was kept outside the part of the log that is read.

        Args:
            key: the group and the partition.
            offset: where the group goes on.
            topic_ids: of the topic and of those before it, the latest first; empty if they are not known.
            at: when the log had it, in seconds since the epoch.
        """
        self._remembered[key] = at
        self.world_of(key.topic).remember(key, offset, topic_ids, at)

    def caught_up(self) -> None:
        """Note that the log has been read up to its end at our start."""
        for world in self.worlds.values():
            world.recall_all()

    def note_time(self, partition: int, at: float) -> None:
        """Note that a partition of the coordination topic has had the time `at`."""
        self._latest[partition] = max(self._latest[partition], at)

    def time_of(self, key: Key) -> float:
        """The time of what we know of a position: the latest that its part of the log has had, as far as we have read.

        Of the positions that are kept outside of the log with one key, the one with the latest time counts. So the
        time of one who has read less must not be later, however late it writes, and however the brokers' clock was set.
        While the clock has been set back, two who have read different parts have one time: of these, the one that
        writes last counts.
        """
        return max(self._latest[self.coordination_partition(key.topic)], self._remembered.get(key, float("-inf")))
