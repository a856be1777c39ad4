"""The two sides of the harvester, as the relay sees them; real servers and a simulation both implement them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from outbox_plugin.core.floor import BEGINNING, Drawn, Span
from outbox_plugin.core.heartbeat import Heartbeat
from outbox_plugin.core.ids import IdRanges
from outbox_plugin.core.lanes import BadRow, Lane
from outbox_plugin.core.last_progress import LastProgress
from outbox_plugin.core.progress import Identity, ProgressRecord, Publication
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.core.takeover import Terms
from outbox_plugin.core.window import BYTES_PER_WINDOW
from outbox_plugin.errors import Away, Refusal


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a read is to return: at most `limit` rows with ids in `span`, in neither `in_flight` nor `parked`."""

    limit: int
    span: Span = Span(BEGINNING)  # noqa: RUF009 - immutable.
    in_flight: IdRanges = IdRanges()  # noqa: RUF009 - immutable.
    parked: frozenset[Lane] = frozenset()

    @property
    def large_bytes(self) -> int:
        """Rows whose value and arrays of headers have at most so many bytes each are in bounds, `limit` of them.

        Larger ones are counted, and read apart.
        """
        return 2 * BYTES_PER_WINDOW // self.limit


@dataclass(frozen=True, slots=True)
class Control:
    """What the database says beside the rows: orders to the leader, and where the ids stand."""

    paused: bool
    parked: frozenset[Lane]
    drawn: Drawn


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of rows: delivered, refused for what they are, or, where they are in neither, unknown.

    `away` says of which topics, by their names, none was sent or acknowledged, though nothing is wrong with the rows.
    """

    delivered: Set[int]
    refused: Mapping[int, Refusal]
    away: Mapping[str, Away] = field(default_factory=dict)


class Outbox(Protocol):
    """The outbox in Postgres, for one term of one shard, in either delivery.

    Every method raises StoreUnavailable when Postgres does not do as asked, and may be called by two threads at once.
    A table that is truncated is no longer the one that the term began with: ids in flight may be given to new rows.
    """

    @property
    def identity(self) -> Identity:
        """Who the outbox was when the term began."""
        ...

    def control(self) -> Control:
        """What is ordered, and where the ids stand.

        Raises:
            StoreUnavailable: the outbox is no longer the one that the term began with.
            LayoutChanged: it has another number of shards now.
        """
        ...

    def snapshot(self) -> str:
        """Which transactions have ended: while it is the same, a read of the same rows finds the same."""
        ...

    def lead(self, leader_id: str) -> None:
        """Let no earlier leader of the shard park or bury any more; durable when it returns.

        The log fences what a leader publishes, not what it puts aside: one that wakes up late would do so with rows
        that have been published since.
        """
        ...

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Remember that the bad rows' lanes wait, and why; durable when it returns.

        Returns:
            Those that the database refuses to remember, each with what it says.

        Raises:
            Fenced: another leader leads the shard.
        """
        ...

    def bury(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Move the bad rows to the dead letters.

        Returns:
            Those that the database refuses to move, each with what it says; they are still in the outbox.

        Raises:
            Fenced: another leader leads the shard.
        """
        ...

    def close(self) -> None:
        """Give the connections back; safe to call twice."""
        ...


class OutboxStore(Outbox, Protocol):
    """The outbox in Postgres, for exactly-once delivery."""

    @property
    def layout(self) -> Layout:
        """How many shards the outbox had when the term began."""
        ...

    def check_leads(self) -> None:
        """Ask whether we lead the shard.

        Raises:
            Fenced: another leader does.
        """
        ...

    def generation(self, slice_: Slice) -> int:
        """Which generation of its transactional id the slice uses: see `core.generations`."""
        ...

    def raise_generation(self, slice_: Slice, present: int) -> int:
        """Let our slice use a generation above `present`; durable when it returns. Returns the new one.

        Raises:
            Fenced: another leader leads the shard.
        """
        ...

    def begin_term(self, above: int = 0) -> Terms:
        """Give the term a number that is above all others, and above `above`; returns what is known of terms."""
        ...

    def recorded(self, term: int) -> None:
        """Remember that the term has written a signed record: from now on, one is expected; durable when it returns.

        Raises:
            Fenced: a later term has, or the outbox is harvested otherwise by now.
        """
        ...

    def nothing_in_flight(self, term: int) -> None:
        """Remember that the term has deleted all that it published: no record of it is expected any more."""
        ...

    def is_settled(self) -> bool:
        """Whether the shards of all earlier layouts have been fenced and recovered."""
        ...

    def settled(self) -> None:
        """Remember that the shards of all earlier layouts have been fenced and recovered."""
        ...

    def read(self, wanted: Wanted) -> Sequence[OutboxRow]:
        """The earliest rows that are wanted, ascending by id.

        Fewer where they are large. None when the outbox is no longer the one that the term began with, or has another
        number of shards.
        """
        ...

    def purge(self, publications: Sequence[Publication]) -> int:
        """Delete the rows of this term's `publications`; durable when it returns. Returns how many rows there were.

        A row that was rewritten since it was read, by an UPDATE or a migration, is deleted too.

        Raises:
            StoreUnavailable: among others, because something lets the deletion have no effect.
        """
        ...

    def recover(self, publications: Sequence[Publication]) -> int:
        """Delete the rows of an earlier term's `publications`, as `purge` does.

        Transaction ids prove nothing here, as a backup may have been restored since. They are used only where a record
        of an earlier version does not say when each row was created.
        """
        ...


class MarkedStore(Outbox, Protocol):
    """The outbox in Postgres, for at-least-once delivery: rows in flight carry their leader's id.

    Once another leader has begun to lead the shard, `control` and `check_leads` raise Fenced, and `mark` marks nothing.
    """

    def check_leads(self) -> None:
        """Ask whether we lead the shard.

        Raises:
            Fenced: another leader does.
        """
        ...

    def mark(self, leader_id: str, wanted: Wanted) -> Sequence[OutboxRow]:
        """Give the earliest rows that are wanted and carry another leader's id, or none, this one's.

        Returns them by ascending id; fewer where they are large. What is in flight need not be said: it carries the
        leader's id.
        """
        ...

    def delete(self, leader_id: str, ids: Sequence[int]) -> int:
        """Delete those of the rows that still carry the leader's id; returns how many.

        Raises:
            StoreUnavailable: among others, because something lets the deletion have no effect. Nobody marks the rows
                again then, and nobody leads until they can be deleted.
        """
        ...

    def reset(self, leader_id: str, ids: Sequence[int]) -> None:
        """Take the leader's id off the rows again, where they still carry it."""
        ...


class Log(Protocol):
    """Kafka, for one term of one shard, in exactly-once delivery.

    Methods raise LogUnavailable (nothing was published; try again), Fenced, or OutcomeUnknown.
    """

    @property
    def in_doubt(self) -> bool:
        """Whether a request of the present producer may still arrive: `fence` before the next `publish`.

        See `core.repeats`.
        """
        ...

    @property
    def largest_progress_bytes(self) -> int:
        """How many bytes a progress record may have, as far as is known by now."""
        ...

    def fence(self, generation: int) -> None:
        """Replace the producer by a new one of this generation.

        That ends every other producer of the slice and the generation, our own last one included: an open transaction
        is aborted, and whatever else an earlier producer sends is refused.

        Raises:
            TransactionStuck: the last transaction has not ended, and it may be long until it does. It is decided.
        """
        ...

    def read_progress(self, *, fenced: bool, accepts_unsigned: bool = False) -> LastProgress:
        """The shard's last progress record.

        `fenced`: every producer that may write there has been fenced, so no open transaction hides a record. Then the
        committed record is certainly the last one. `accepts_unsigned`: the last leader may have been of a version that
        did not sign.
        """
        ...

    def former(self, slice_: Slice) -> Log:
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
        """Let go of the producer; an open transaction is left to the next leader's fence. Safe to call twice."""
        ...


class AcknowledgingLog(Protocol):
    """Kafka, for one term, in at-least-once delivery: no transactions."""

    def send(self, rows: Sequence[OutboxRow], confirm: Callable[[], None]) -> Sent:
        """Send `rows`, in which no key of a topic occurs twice, and wait for what becomes of each.

        `confirm` is called once nothing else is to be waited for, just before the first is sent; what it raises is
        raised, and nothing is sent then.
        """
        ...

    def close(self) -> None:
        """Let go of the producer; what is not acknowledged may still arrive. Safe to call twice."""
        ...


class WakeUp(Protocol):
    """The outbox's own word that a row has come, where `outbox migrate --wake-up` has installed the trigger."""

    def asleep(self) -> bool:
        """Ask writers to wake us from now on; False while one is at work that would not. Read once more after it."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until a writer has woken us, or `interrupt` was called; False after `seconds`."""
        ...

    def interrupt(self) -> None:
        """End a `wait` that another thread is in."""
        ...

    def awake(self) -> None:
        """Spare writers the trouble again."""
        ...

    def close(self) -> None:
        """Give the connection back; safe to call twice."""
        ...


class Membership(Protocol):
    """The harvester's seat at the leader topic. Only `send` may be called by two threads at once."""

    def owned(self) -> Set[int]:
        """The shards whose leader-topic partitions the group coordinator has given us, as far as we know."""
        ...

    def heard(self, wait_seconds: float) -> Iterable[Heartbeat]:
        """Heartbeats of this outbox that have arrived, waiting up to `wait_seconds` for the first.

        Left out are those that no harvester of this outbox has signed, and copies of earlier ones: see `freshness`.
        """
        ...

    def stranger(self) -> Heartbeat | None:
        """The last record since the last call that says it is a heartbeat, and that this outbox has not signed.

        Anybody who may write to the topic can have written it.
        """
        ...

    def check_topic(self) -> None:
        """Ask whether the leader topic is there. No answer means nothing.

        Raises:
            TopicMissing: the brokers do not know it.
        """
        ...

    def check_progress_topic(self) -> None:
        """Ask now and then whether the progress topic is still the one that it was. Waits for nothing.

        A leader's next records say that they stand behind the offsets of its last ones. In a topic that was made anew
        they do not, so they would be taken for copies.

        Raises:
            TopicMissing: somebody, or the broker, has made it anew.
        """
        ...

    def send(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat without waiting; one that cannot be sent in time is dropped."""
        ...

    def leave(self, timeout_seconds: float) -> None:
        """Send what is to be sent, leave the group at once, and close."""
        ...
