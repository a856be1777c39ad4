"""Every exception a user can meet.

    OutboxError                  something this package raises on purpose
     |- UserError                the request cannot be carried out as it is: exit code 2
     |   |- InvalidSetting       a setting is missing or wrong
     |   |- InvalidEvent         an event that the table or the broker would refuse
     |   |- ServerRefused        a server refused us, or could not be reached at start
     |   |- SchemaMissing        our tables are not there, or not of the form we need
     |   |- ForeignOutbox        group and outbox do not belong together
     |   |- ProgressLost         the progress topic lacks a record that the database expects
     |   |- WrongConnection      a connection that events cannot be emitted on as it is
     |   |- HandlerMisuse        a handler ended its transaction, or broke it
     |   |- RangeRefused         a range of offsets that cannot be consumed as it is
     |   `- TopicReplaced        a topic was deleted and created anew since it was last consumed
     |- ServerUnavailable        a server is away for now: wait and try again
     |   |- StoreUnavailable     Postgres
     |   `- LogUnavailable       Kafka
     |       `- TransactionStuck a transaction cannot end, because a partition that it touched has no leader
     |- TermEnded                this term may not publish any more: take over again or follow
     |   |- Fenced               another harvester took the shard over
     |   |- OutcomeUnknown       a commit or abort was not answered: only Kafka knows the outcome
     |   |- LayoutChanged        the outbox has another number of shards now
     |   `- TopicMissing         somebody deleted one of the group's own topics
     |- TopicsAway               some topics cannot be written to now; others can
     `- RowsRefused              Kafka refused rows because of what they contain

The name says whose fault it is; the command line ends with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class OutboxError(Exception):
    """Something went wrong in the outbox."""

    exit_code = 1


class UserError(OutboxError):
    """The user's request cannot be carried out as it is."""

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
    """The outbox's tables are not there, or do not have the form that is needed."""


class ForeignOutbox(UserError):
    """The group and the outbox do not belong together."""


class ProgressLost(UserError):
    """The progress topic lacks a record that the database expects: rows could be published again."""


class WrongConnection(UserError):
    """Events cannot be emitted on this connection as it is."""


class HandlerMisuse(UserError):
    """A handler ended the inbox's transaction, or left it so that the inbox cannot commit it."""


RAISED_ROLLBACK = (
    "the handler raised psycopg.Rollback: raise an exception of your own to fail, or roll back to a savepoint within it"
)


class RangeRefused(UserError):
    """A range of offsets cannot be consumed as it is; nothing was written."""


class TopicReplaced(UserError):
    """A topic was deleted and created anew, so a position in the old one has no meaning; nothing was written."""

    def __init__(self, consumer: str, topic: str, known: str, found: str) -> None:
        super().__init__(
            f"the topic {topic} was made anew (its id was {known}, and is {found}), so {consumer} stands still: "
            "say where it is to begin in the new one, by the job that sets its position"
        )


class ServerUnavailable(OutboxError):
    """A server is away for now: wait and try again."""


class StoreUnavailable(ServerUnavailable):
    """Postgres is away for now."""


class LogUnavailable(ServerUnavailable):
    """Kafka is away for now."""


class TransactionStuck(LogUnavailable):
    """The shard's last transaction has not ended: usually, a partition that it touched has no leader.

    Until it has one, the transaction coordinator takes no other transaction of the same transactional id.
    """


class TermEnded(OutboxError):
    """This term may not publish any more."""


class Fenced(TermEnded):
    """Another harvester took the shard over."""


class OutcomeUnknown(TermEnded):
    """A commit or an abort was not answered: only Kafka knows the outcome."""


class LayoutChanged(TermEnded):
    """The outbox has another number of shards, or another group, now. The harvester reads them and begins again."""


class TopicMissing(TermEnded):
    """Somebody deleted one of the group's own topics, or created it anew. A harvester then begins again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why Kafka refuses a row. `whole_topic`: the topic itself is wrong, and all rows of it are refused."""

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
    """Kafka refused rows because of what they contain, not because of an outage. Nothing was published.

    `refusals` has the reasons by the rows' ids, `away` the topics that cannot be written to now, as in `TopicsAway`.
    """

    def __init__(self, refusals: Mapping[int, Refusal], away: Mapping[str, Away] | None = None) -> None:
        id_, first = next(iter(refusals.items()))
        more = f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""
        super().__init__(f"row {id_}: {first.reason}{more}")
        self.refusals = refusals
        self.away = away or {}
