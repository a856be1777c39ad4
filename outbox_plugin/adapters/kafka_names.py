"""What a group of harvesters calls its topics, its consumer group and its transactional ids in Kafka."""

from __future__ import annotations

from dataclasses import dataclass

from outbox_plugin.core.shards import Slice
from outbox_plugin.settings import Settings

LEADER_SUFFIX, PROGRESS_SUFFIX = "-leader", "-progress"  # Of a group's topics.


@dataclass(frozen=True, slots=True)
class KafkaNames:
    """The names of one group. The leader topic and the leader group may be those of another group, to share them."""

    group: str
    leader_topic: str
    leader_group: str

    @classmethod
    def of(cls, settings: Settings) -> KafkaNames:
        """The names that `settings` ask for."""
        election = settings.group + LEADER_SUFFIX
        return cls(settings.group, settings.leader_topic or election, settings.leader_group or election)

    @property
    def progress_topic(self) -> str:
        """Progress records; compacted, one partition a shard, a key a slice."""
        return self.group + PROGRESS_SUFFIX

    def transactional_id(self, slice_: Slice, generation: int) -> str:
        """The id whose producers fence each other; see `core.transactional_id_generations`."""
        return f"{self.group}-{slice_.name}" + (f"-g{generation}" if generation else "")
