"""What happened in a harvester, as values: for its log, its counters, and whoever waits for it in a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from outbox_plugin.core.lanes import BadRow, Lane
from outbox_plugin.errors import Away

WORTH_SAYING_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class HarvestEvent:
    """Something happened in `shard`."""

    shard: int


@dataclass(frozen=True, slots=True)
class TermBegan(HarvestEvent):
    """This harvester leads; `recovered` rows that the last leader had published have been deleted.

    `term` is the number of the term, where terms are numbered: in exactly-once delivery.
    """

    leader_id: str
    recovered: int
    term: int | None = None


@dataclass(frozen=True, slots=True)
class RecordsIgnored(HarvestEvent):
    """The progress topic has `count` records that no harvester of this outbox has signed."""

    count: int

    def told(self) -> str:
        """What happened, in a sentence."""
        return f"{self.count} records of the progress topic are signed by no harvester of this outbox, and are ignored"


@dataclass(frozen=True, slots=True)
class WindowPublished(HarvestEvent):
    """A window of `rows` has been committed to Kafka, `seconds` after it was read."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WindowPurged(HarvestEvent):
    """The `rows` of a window have been deleted, durably."""

    rows: int


@dataclass(frozen=True, slots=True)
class RowsParked(HarvestEvent):
    """Kafka refuses rows, and their lanes wait until they are released."""

    bad: tuple[BadRow, ...]


@dataclass(frozen=True, slots=True)
class RowsBuried(HarvestEvent):
    """Kafka refused rows, and they are dead letters now."""

    bad: tuple[BadRow, ...]


@dataclass(frozen=True, slots=True)
class LanesHeld(HarvestEvent):
    """The rows of `lanes` are left unread for `seconds`, for the `reason`; then they are tried again."""

    lanes: tuple[Lane, ...]
    reason: str
    seconds: float

    def told(self, lane: Lane) -> str:
        """What happens to a lane, in a sentence."""
        whose = f"topic {lane.topic}" if lane.whole_topic else f"topic {lane.topic}, {lane.whose}"
        return f"{whose} is held back for {self.seconds:.1f} s, then tried again: {self.reason}"


@dataclass(frozen=True, slots=True)
class GenerationRaised(HarvestEvent):
    """The last transaction cannot end, so the leader goes on under the transactional id of this `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class TermFinished(HarvestEvent):
    """This harvester leads the shard no more; `reason` is None after a stop that was asked for."""

    leader_id: str
    reason: str | None


def held_topics(shard: int, topics: Mapping[str, Away]) -> Iterator[LanesHeld]:
    """What to say when `topics` are held back; nothing of those that are tried again in a moment."""
    for topic, away in topics.items():
        if away.seconds >= WORTH_SAYING_SECONDS:
            yield LanesHeld(shard, (Lane(topic, None),), away.reason, away.seconds)


Observer = Callable[[HarvestEvent], None]
