"""What the relay needs of Kafka. The adapters implement it on real brokers, the tests in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from outbox_plugin.core.last_progress import LastProgress
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.progress import ProgressRecord
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Slice
from outbox_plugin.errors import Away, Refusal


@dataclass(frozen=True, slots=True)
class SendResult:
    """What became of rows, by their ids: delivered, refused for what they are, or unknown if neither names them.

    `away` names topics to which no row was sent, or which acknowledged none, although the rows are good.
    """

    delivered: Set[int]
    refused: Mapping[int, Refusal]
    away: Mapping[str, Away] = field(default_factory=dict)


class TransactionalLog(Protocol):
    """Kafka, for one term of one shard, in exactly-once delivery.

    Methods raise LogUnavailable (nothing was published; try again), Fenced, or OutcomeUnknown.
    """

    @property
    def in_doubt(self) -> bool:
        """Whether a request of the present producer may still arrive: `fence` before the next `publish`.

        The rule is in `core.repeated_requests`.
        """
        ...

    @property
    def largest_progress_bytes(self) -> int:
        """How many bytes a progress record may have, as far as the client and the broker have shown."""
        ...

    def fence(self, generation: int) -> None:
        """Replace the producer by a new one of this generation.

        That ends every other producer of the slice and the generation, our own last one included: an open transaction
        is aborted, and whatever else an earlier producer sends is refused.

        Raises:
            TransactionStuck: the last transaction is decided, but has not ended, and that may take long.
        """
        ...

    def read_progress(self, *, fenced: bool, accepts_unsigned: bool = False) -> LastProgress:
        """The shard's last progress record.

        Args:
            fenced: whether every producer that may write there has been fenced. Then no open transaction hides a
                record, and the committed record is certainly the last one.
            accepts_unsigned: whether the last leader may have been of a version that did not sign.
        """
        ...

    def former(self, slice_: Slice) -> TransactionalLog:
        """The log of a shard of an earlier layout; to be closed by the caller."""
        ...

    def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> bool:
        """Publish `rows` in their order and `progress`, signed and with the next number, in one transaction.

        Returns False if nothing was published, and the same rows are to be tried again.

        Raises:
            RowsRefused: Kafka refused rows for what they are; nothing was published.
            TopicsAway: some of the rows' topics cannot be written to now; nothing was published.
        """
        ...

    def close(self) -> None:
        """Close the producer; an open transaction is left to the next leader's fence. Safe to call twice."""
        ...


class AcknowledgingLog(Protocol):
    """Kafka, for one term, in at-least-once delivery: no transactions."""

    def send(self, rows: Sequence[OutboxRow], confirm: Callable[[], None]) -> SendResult:
        """Send rows and wait for the result of each.

        Args:
            rows: what to send; no key of a topic occurs twice.
            confirm: is called just before the first row is sent, when nothing else remains to be waited for. What it
                raises is raised, and nothing is sent.
        """
        ...

    def close(self) -> None:
        """Close the producer; what is not acknowledged may still arrive. Safe to call twice."""
        ...


class Membership(Protocol):
    """The harvester as a member of the leader group. Only `send` may be called by two threads at once."""

    def owned(self) -> Set[int]:
        """The shards whose leader-topic partitions the group coordinator has assigned to us, as far as we know."""
        ...

    def receive(self, wait_seconds: float) -> Iterable[LeaderHeartbeat]:
        """Receive heartbeats of this outbox that have arrived, waiting up to `wait_seconds` for the first.

        Left out are those that no harvester of this outbox has signed, and copies of earlier ones, which
        `core.copied_heartbeats` recognizes.
        """
        ...

    def take_vacant(self) -> Set[int]:
        """The shards of which `receive` has found since the last call that nobody led them when we connected.

        Their last leader had resigned (`core.last_leader`), or nobody has sent a heartbeat for as long as Kafka keeps
        them.
        """
        ...

    def take_unsigned_heartbeat(self) -> LeaderHeartbeat | None:
        """The last record since the last call that looks like a heartbeat, but is not signed by this outbox.

        Anybody who may write to the topic can have written it.
        """
        ...

    def check_topic(self) -> None:
        """Check that the leader topic exists. If Kafka does not answer, nothing is raised.

        Raises:
            TopicMissing: the brokers do not know it.
        """
        ...

    def check_progress_topic(self) -> None:
        """Check now and then that the progress topic is still the same one. Waits for nothing.

        A leader's records name the offsets that they follow. In a topic that was recreated, offsets begin again, so
        these records would look like copies.

        Raises:
            TopicMissing: the topic was deleted and recreated.
        """
        ...

    def send(self, heartbeat: LeaderHeartbeat) -> None:
        """Send a heartbeat without waiting; one that cannot be sent in time is dropped."""
        ...

    def leave(self, timeout_seconds: float) -> None:
        """Send what is to be sent, leave the group at once, and close."""
        ...
