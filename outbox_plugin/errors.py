"""Every exception a user can meet.

    OutboxError                  something this package raises on purpose
     |- UserError                what was asked cannot be done as asked: exit code 2
     |   |- InvalidSetting       a setting is missing or wrong
     |   |- InvalidEvent         an event that the table or the broker would refuse
     |   |- ServerRefused        a server was reached, or cannot be at start, and said no
     |   |- SchemaMissing        our tables are not there, or not of the form we need
     |   |- ForeignOutbox        group and outbox do not belong together
    |   |- ProgressLost         the progress topic lacks a record that the database expects
     |   |- WrongConnection      a connection that events cannot be emitted on as it is
     |   |- HandlerMisuse        a handler did with its transaction what is not its to do
     |   |- RangeRefused         a range of offsets that cannot be consumed as it is
     |   `- TopicReplaced        a topic was made anew since it was last consumed
     |- ServerUnavailable        a server is away for now: wait and try again
     |   |- StoreUnavailable     Postgres
     |   `- LogUnavailable       Kafka
     |       `- TransactionStuck a transaction cannot end, as a partition that it touched has no leader
     |- TermEnded                this term may publish nothing any more: take over again or follow
     |   |- Fenced               another harvester took the shard over
     |   |- OutcomeUnknown       a commit or abort was not answered: only the log knows
     |   |- LayoutChanged        the outbox has another number of shards now
     |   `- TopicMissing         somebody deleted one of the group's own topics
     |- TopicsAway               some topics cannot be written to now; others can
     `- RowsRefused              Kafka refused rows for what they are

The name says whose fault it is; `exit_code` is what the command line ends with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class OutboxError(Exception):
    """Something went wrong in the outbox."""

    exit_code = 1


class UserError(OutboxError):
    """What was asked cannot be done as asked."""

    exit_code = 2


class InvalidSetting(UserError):
    """A setting is missing or wrong."""


class InvalidEvent(UserError):
    """An event that the outbox table or the broker would refuse.

    `field` names the event's field that is wrong.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"event {field}: {problem}")
        self.field = field


class ServerRefused(UserError):
    """A server could not be reached at start, or refused us for good."""


class SchemaMissing(UserError):
    """The outbox's tables are not there, or not of the form that is needed."""


class ForeignOutbox(UserError):
    """The group and the outbox do not belong together."""


class ProgressLost(UserError):
    """The progress topic lacks a record that the database expects: rows could be published again."""


class WrongConnection(UserError):
    """Events cannot be emitted on this connection as it is."""


class HandlerMisuse(UserError):
    """A handler did with the inbox's transaction what is not the handler's to do."""


RAISED_ROLLBACK = (
    "the handler raised psycopg.Rollback: raise an exception of your own to fail, or roll back to a savepoint within it"
)


class RangeRefused(UserError):
    """A range of offsets cannot be consumed as it is; nothing was written."""


class TopicReplaced(UserError):
    """A topic was deleted and made anew, so a position in the old one says nothing; nothing was written."""

    def __init__(self, consumer: str, topic: str, known: str, found: str) -> None:
        super().__init__(
            f"the topic {topic} was made anew (its id was {known}, and is {found}), so {consumer} stands still: "
            "say where it is to begin in the new one, by the job that sets its position"
        )


class ServerUnavailable(OutboxError):
    """A server is away for now; waiting and trying again is the cure."""


class StoreUnavailable(ServerUnavailable):
    """Postgres is away for now."""


class LogUnavailable(ServerUnavailable):
    """Kafka is away for now."""


class TransactionStuck(LogUnavailable):
    """The shard's last transaction has not ended: usually, a partition that it touched has no leader.

    Until it has one, the transaction coordinator takes no other transaction of the same transactional id.
    """


class TermEnded(OutboxError):
    """This term may publish nothing any more."""


class Fenced(TermEnded):
    """Another harvester took the shard over."""


class OutcomeUnknown(TermEnded):
    """A commit or an abort was not answered: only the log knows what became of it."""


class LayoutChanged(TermEnded):
    """The outbox has another number of shards, or another group, now: a harvester asks which, and acts on it."""


class TopicMissing(TermEnded):
    """Somebody deleted one of the group's own topics, or made it anew; a harvester sees to it and begins again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why Kafka refuses a row; `whole_topic` where the topic itself is what is wrong."""

    reason: str
    whole_topic: bool = False


@dataclass(frozen=True, slots=True)
class Away:
    """Why a topic cannot be written to now, and in how many seconds to try again."""

    reason: str
    seconds: float


class TopicsAway(OutboxError):
    """Topics that cannot be written to now, though nothing is wrong with their rows; nothing was published."""

    def __init__(self, topics: Mapping[str, Away]) -> None:
        topic, first = next(iter(topics.items()))
        more = f", and {len(topics) - 1} more" if len(topics) > 1 else ""
        super().__init__(f"topic {topic}: {first.reason}{more}")
        self.topics = topics


class RowsRefused(OutboxError):
    """Kafka refused rows for what they are, not for how Kafka is; `refusals` by the row's id. Nothing was published.

    `away` has the topics that cannot be written to now, as `TopicsAway` has.
    """

    def __init__(self, refusals: Mapping[int, Refusal], away: Mapping[str, Away] | None = None) -> None:
        id_, first = next(iter(refusals.items()))
        more = f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""
        super().__init__(f"row {id_}: {first.reason}{more}")
        self.refusals = refusals
        self.away = away or {}
