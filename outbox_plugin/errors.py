"""Every exception that users can get.

    OutboxError                  every error that this package raises on purpose
     |- UserError                the request cannot be carried out as it is: exit code 2
     |   |- InvalidSetting       a setting is missing or wrong
     |   |- InvalidEvent         an event that the table or the broker would refuse
     |   |- ServerRefused        a server refused us, or could not be reached at start
     |   |- SchemaMissing        the outbox's tables are missing, or do not have the form that is needed
     |   |- ForeignOutbox        group and outbox do not belong together
     |   |- ProgressLost         the progress topic lacks a record that the database expects
     |   |- WrongConnection      events cannot be emitted on the connection as it is
     |   |- HandlerMisuse        a handler ended its transaction, or broke it
     |   |- RangeRefused         a range of offsets cannot be consumed as it is
     |   `- TopicReplaced        a topic was deleted and recreated since it was last consumed
     |- ServerUnavailable        a server cannot be reached for now: wait and try again
     |   |- StoreUnavailable     Postgres
     |   |- RegistryUnavailable  the schema registry
     |   |- ClaimUnavailable     a value in an object store
     |   `- LogUnavailable       Kafka
     |       `- TransactionStuck a transaction cannot end, because a partition that it touched has no leader
     |- TermEnded                this term may not publish any more: take over again or follow
     |   |- Fenced               another harvester took the shard over
     |   |- OutcomeUnknown       a commit or abort was not answered: only Kafka knows the outcome
     |   |- LayoutChanged        the outbox has another number of shards, group or secret now
     |   `- TopicMissing         somebody deleted one of the group's own topics
     |- CommitUnknown            a Spark job's commit was not answered: all was written, or nothing
     |- TopicsAway               some topics cannot be written to now; others can
     `- RowsRefused              Kafka refused rows because of what they contain

After an error, the command line ends with the error's `exit_code`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """The outbox's tables are missing, or do not have the form that is needed."""


class ForeignOutbox(UserError):
    """The group and the outbox do not belong together."""


class ProgressLost(UserError):
    """The progress topic lacks a record that the database expects: rows could be published again."""


class WrongConnection(UserError):
    """Events cannot be emitted on this connection as it is."""


class HandlerMisuse(UserError):
    """A handler ended the inbox's transaction, or left it in a state that the inbox cannot commit."""


RAISED_ROLLBACK = (
    "the handler raised psycopg.Rollback: raise an exception of your own to fail, or roll back to a savepoint within it"
)


class RangeRefused(UserError):
    """A range of offsets cannot be consumed as it is; nothing was written."""


class TopicReplaced(UserError):
    """A topic was deleted and recreated, so a position in the old one has no meaning; nothing was written."""

    def __init__(self, consumer: str, topic: str, known: str, found: str) -> None:
        """Make the message.

        Args:
            consumer: what has stopped, for the message.
            topic: its name.
            known: the id of the topic that the position is of.
            found: the id of the topic that has this name now.
        """
        super().__init__(
            f"the topic {topic} was deleted and recreated (its id was {known} and is now {found}), so {consumer} has "
            "stopped: set its position in the new topic with the job that sets positions"
        )


class ServerUnavailable(OutboxError):
    """A server cannot be reached for now: wait and try again."""


class StoreUnavailable(ServerUnavailable):
    """Postgres cannot be reached for now."""


class RegistryUnavailable(ServerUnavailable):
    """The schema registry cannot be reached for now. Nothing was written, and the caller's transaction can go on."""


class ClaimUnavailable(ServerUnavailable):
    """A large value cannot be stored in the object store, or fetched from it, for now."""


class LogUnavailable(ServerUnavailable):
    """Kafka cannot be reached for now."""


class TransactionStuck(LogUnavailable):
    """The shard's last transaction has not ended, usually because a partition that it wrote to has no leader.

    Until that partition has a leader again, the transaction coordinator accepts no other transaction of the same
    transactional id.
    """


class TermEnded(OutboxError):
    """This term may not publish any more."""


class Fenced(TermEnded):
    """Another harvester took the shard over."""


class OutcomeUnknown(TermEnded):
    """A commit or an abort was not answered: only Kafka knows the outcome."""


class CommitUnknown(OutboxError):
    """Postgres was lost during the commit of a Spark job: all of its rows and events were written, or none.

    The message says how to run the job again so that they are written once.
    """


class LayoutChanged(TermEnded):
    """The outbox's number of shards, group or secret has changed. The harvester reads them again and starts over."""


class TopicMissing(TermEnded):
    """Somebody deleted or recreated one of the group's own topics. The harvester starts over."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why Kafka refuses a row. If `whole_topic`, the topic itself is wrong, and all of its rows are refused."""

    reason: str
    whole_topic: bool = False


@dataclass(frozen=True, slots=True)
class Away:
    """Why a topic cannot be written to now, and after how many seconds to try again."""

    reason: str
    seconds: float


class TopicsAway(OutboxError):
    """Some topics cannot be written to now, though nothing is wrong with their rows. Nothing was published."""

    def __init__(self, topics: Mapping[str, Away]) -> None:
        topic, first = next(iter(topics.items()))
        more = f", and {len(topics) - 1} more" if len(topics) > 1 else ""
        super().__init__(f"topic {topic}: {first.reason}{more}")
        self.topics = topics


class RowsRefused(OutboxError):
    """Kafka refused rows because of what they contain, not because of an outage. Nothing was published."""

    def __init__(
        self,
        refusals: Mapping[int, Refusal],
        away: Mapping[str, Away] | None = None,
        maybe_oversize: Iterable[int] = (),
    ) -> None:
        """Make the message.

        Args:
            refusals: the reasons, by the rows' ids.
            away: the topics that cannot be written to now, as in `TopicsAway`.
            maybe_oversize: the ids of rows that may be too large, too. A try of each costs a transaction.
        """
        id_, first = next(iter(refusals.items()))
        more = f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""
        super().__init__(f"row {id_}: {first.reason}{more}")
        self.refusals = refusals
        self.away = away or {}
        self.maybe_oversize = frozenset(maybe_oversize)
