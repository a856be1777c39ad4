"""What happened in a harvester, as values: for its log, its counters, and whoever waits for it in a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.leader_heartbeat import Phase
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import Away

WORTH_SAYING_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class HarvestEvent:
    """Something happened in `shard`."""

    shard: int


@dataclass(frozen=True, slots=True)
class ShardStepped(HarvestEvent):
    """The supervisor looks after the shard; told every half second at most.

    `leader_heard_at` is when another harvester was last heard to lead, in seconds of the runtime's clock.
    """

    phase: Phase
    leader_heard_at: float | None
    trouble: str | None


@dataclass(frozen=True, slots=True)
class BeginsAgain(HarvestEvent):
    """All shards of the outbox are given up, and taken up again once that is possible. One event stands for all."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakeoverBegan(HarvestEvent):
    """This harvester is a candidate, and leads as soon as `TermBegan` follows."""

    leader_id: str


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

    def message(self) -> str:
        """What happened, in a sentence."""
        return f"{self.count} records of the progress topic are signed by no harvester of this outbox, and are ignored"


@dataclass(frozen=True, slots=True)
class RowsRead(HarvestEvent):
    """A read of the outbox has returned `rows` rows, perhaps none, after `seconds`."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TransactionEnded(HarvestEvent):
    """A Kafka transaction has taken `seconds`. `error_type` names what ended it; None where it is committed."""

    seconds: float
    error_type: str | None


@dataclass(frozen=True, slots=True)
class WindowPublished(HarvestEvent):
    """A window of `rows` has been committed to Kafka, `seconds` after it was read; `records` are its rows.

    `sending_seconds` is how long its last transaction took, or in at-least-once delivery all of its rounds.
    """

    rows: int
    seconds: float
    sending_seconds: float
    records: Sequence[OutboxRow] = field(repr=False)


@dataclass(frozen=True, slots=True)
class WindowPurged(HarvestEvent):
    """The `rows` of windows have been deleted, durably, which took `seconds`."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RowsParked(HarvestEvent):
    """Kafka refuses rows, and later rows of their keys wait until they are released."""

    bad: tuple[BadRow, ...]


@dataclass(frozen=True, slots=True)
class RowsDeadLettered(HarvestEvent):
    """Kafka refused rows, and they are dead letters now."""

    bad: tuple[BadRow, ...]


@dataclass(frozen=True, slots=True)
class KeysHeld(HarvestEvent):
    """The rows of `keys` are left unread for `seconds`, for the `reason`; then they are tried again."""

    keys: tuple[OrderingKey, ...]
    reason: str
    seconds: float

    def message(self, key: OrderingKey) -> str:
        """What happens to a key, in a sentence."""
        which = f"topic {key.topic}" if key.whole_topic else f"topic {key.topic}, {key.description}"
        return f"{which} is held back for {self.seconds:.1f} s, then tried again: {self.reason}"


@dataclass(frozen=True, slots=True)
class KeysSummarised(HarvestEvent):
    """The keys of a backlog of `rows` at most were summarised in `seconds`: live rows go before it.

    `error` says why they could not be. Then live rows wait in line.
    """

    rows: int
    seconds: float
    error: str | None

    def message(self) -> str:
        """What an operator should know."""
        if self.error is not None:
            return f"new rows wait behind the backlog, as its keys cannot be read: {self.error}"
        return f"new rows go before a backlog of up to {self.rows:,} rows, whose keys took {self.seconds:.1f} s to read"


@dataclass(frozen=True, slots=True)
class LiveRowsLeftOut(HarvestEvent):
    """Live rows that go first were read, but for those that may have a key of the backlog: `waiting` of them so far.

    They are sent in line, when the backlog has been read.
    """

    waiting: int


@dataclass(frozen=True, slots=True)
class LiveRowsJoined(HarvestEvent):
    """The backlog has been read, and all rows go in line again."""


@dataclass(frozen=True, slots=True)
class GenerationRaised(HarvestEvent):
    """The last transaction cannot end, so the leader goes on under the transactional id of this `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class TermFinished(HarvestEvent):
    """A term of this harvester has ended; `reason` is None after a stop that was asked for.

    `error_type` names the exception that ended the term; None where no exception did. `is_planned`: the shard moves to
    the harvester that Kafka has assigned it to, and nothing is wrong. `has_led`: whether the term had taken over;
    otherwise its takeover has failed.
    """

    leader_id: str
    reason: str | None
    error_type: str | None
    is_planned: bool = False
    has_led: bool = True


def held_topics(shard: int, topics: Mapping[str, Away]) -> Iterator[KeysHeld]:
    """What to say when `topics` are held back; nothing of those that are tried again in a moment."""
    for topic, away in topics.items():
        if away.seconds >= WORTH_SAYING_SECONDS:
            yield KeysHeld(shard, (OrderingKey(topic, None),), away.reason, away.seconds)


Observer = Callable[[HarvestEvent], None]
