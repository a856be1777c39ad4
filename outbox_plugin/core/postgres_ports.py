"""What the relay needs of Postgres. The adapters implement it on a real server, the tests in a simulation."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outbox_plugin.core.bad_rows import BadRow
from outbox_plugin.core.id_ranges import IdRanges
from outbox_plugin.core.id_watermark import BEGINNING, IdRange, SequenceState
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.progress import OutboxIdentity, Publication
from outbox_plugin.core.recovery import TermHistory
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.core.shards import Layout, Slice
from outbox_plugin.core.window import BYTES_PER_WINDOW


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What to read: at most `limit` rows with `ids`.

    Left out are rows whose ids are `in_flight`, and those whose ordering keys are among the `excluded_keys`.
    """

    limit: int
    ids: IdRange = IdRange(BEGINNING)  # noqa: RUF009 - immutable.
    in_flight: IdRanges = IdRanges()  # noqa: RUF009 - immutable.
    excluded_keys: frozenset[OrderingKey] = frozenset()
    is_live: bool = False  # Few rows are expected, whatever other reads find.

    @property
    def large_bytes(self) -> int:
        """Values and arrays of headers of at most this many bytes need not be measured.

        `limit` rows with such values stay within bounds. Larger rows are measured, and read apart.
        """
        return 2 * BYTES_PER_WINDOW // self.limit


@dataclass(frozen=True, slots=True)
class Control:
    """What the database says besides rows: commands to the leader, and the state of the id sequence."""

    paused: bool
    parked: frozenset[OrderingKey]
    sequence: SequenceState


class ShardStore(Protocol):
    """One shard's rows in Postgres, for one term, in either delivery.

    Every method raises StoreUnavailable when Postgres does not do as asked. Two threads may call methods at once. A
    table that is truncated is no longer the one that the term began with: ids in flight may be given to new rows.
    """

    @property
    def identity(self) -> OutboxIdentity:
        """Which outbox it was when the term began."""
        ...

    def control(self) -> Control:
        """Ask for commands and for the state of the id sequence.

        Raises:
            StoreUnavailable: the outbox is no longer the one that the term began with.
            LayoutChanged: it has another number of shards now.
        """
        ...

    def snapshot(self) -> str:
        """A text that changes when a transaction ends. While it is the same, the same read finds the same rows."""
        ...

    def lead(self, leader_id: str) -> None:
        """Let no earlier leader of the shard park or dead-letter rows any more; durable when it returns.

        Kafka fences what a leader publishes, not what it parks or dead-letters. Without this, a leader that wakes up
        late would do so with rows that have been published since.

        Raises:
            StoreUnavailable: also where the outbox is no longer the one that the term began with, or has another number
                of shards.
        """
        ...

    def park(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Park the bad rows' ordering keys, with the reason; durable when it returns.

        Returns:
            The rows that the database refuses to park, each with its reason.

        Raises:
            Fenced: another leader leads the shard.
        """
        ...

    def dead_letter(self, bad: Sequence[BadRow]) -> Sequence[BadRow]:
        """Move the bad rows to the dead letters.

        Returns:
            The rows that the database refuses to move, each with its reason; they are still in the outbox.

        Raises:
            Fenced: another leader leads the shard.
        """
        ...

    def close(self) -> None:
        """Close the connections; safe to call twice."""
        ...


class WindowStore(ShardStore, Protocol):
    """One shard's rows in Postgres, for exactly-once delivery."""

    @property
    def layout(self) -> Layout:
        """How many shards the outbox had when the term began."""
        ...

    def check_leads(self) -> None:
        """Check that we lead the shard.

        Raises:
            Fenced: another leader does.
        """
        ...

    def generation(self, slice_: Slice) -> int:
        """Which generation of its transactional id the slice uses: see `core.transactional_id_generations`."""
        ...

    def raise_generation(self, slice_: Slice, present: int) -> int:
        """Move our slice to a generation above `present`; durable when it returns. Returns the new one.

        Raises:
            Fenced: another leader leads the shard.
        """
        ...

    def begin_term(self, above: int = 0) -> TermHistory:
        """Give the term a number above all earlier ones, and above `above`. Returns what is known of terms."""
        ...

    def mark_recorded(self, term: int) -> None:
        """Remember that the term has written a signed progress record, so that later leaders expect one.

        It is durable when this returns.

        Raises:
            Fenced: a later term has, or the outbox is harvested otherwise by now.
        """
        ...

    def mark_nothing_in_flight(self, term: int) -> None:
        """Remember that the term has deleted all that it published: later leaders expect no record of it."""
        ...

    def is_settled(self) -> bool:
        """Whether the shards of all earlier layouts have been fenced and recovered."""
        ...

    def mark_settled(self) -> None:
        """Remember that the shards of all earlier layouts have been fenced and recovered."""
        ...

    def read(self, request: ReadRequest) -> Sequence[OutboxRow]:
        """The earliest rows of the request, ascending by id.

        Returns fewer rows if they are large. Returns no row if the outbox is no longer the one that the term began
        with, or if it has another number of shards.
        """
        ...

    def key_hashes(self, rows: Sequence[OutboxRow]) -> Sequence[int]:
        """A hash of each row's topic and key, of `core.key_summary.HASH_BITS` bits."""
        ...

    def end_of_batch(self, up_to: int) -> int | None:
        """The last id, at most `up_to`, of a transaction that has written many of the latest rows; None without one.

        It is a guess. It only decides how soon some rows are relayed.
        """
        ...

    def key_hashes_up_to(self, bound: int, rows: int) -> Generator[bytes]:
        """The hashes of all rows of the slice with ids up to `bound`, rows in flight included, in parts.

        `rows` is an upper bound of how many rows there are. At most so many hashes of other keys may be among the
        result. Each hash has `core.key_summary.HASH_BYTES` bytes, big-endian. The method may run beside all others, on
        a connection of its own.
        """
        ...

    def cancel_key_hashes(self) -> None:
        """End `key_hashes_up_to`, if it reads, and let it read nothing from now on; from another thread.

        Returns when it has ended, or after a while.
        """
        ...

    def purge(self, publications: Sequence[Publication]) -> int:
        """Delete the rows of this term's `publications`; durable when it returns. Returns how many rows there were.

        A row that was rewritten since it was read, by an UPDATE or a migration, is deleted too.

        Raises:
            StoreUnavailable: Postgres is away, or a trigger or a policy keeps the rows.
        """
        ...

    def recover(self, publications: Sequence[Publication]) -> int:
        """Delete the rows of an earlier term's `publications`, as `purge` does.

        Transaction ids prove nothing here, because a backup may have been restored since. They are used only if a
        record of an earlier version has no creation times.
        """
        ...


class MarkedStore(ShardStore, Protocol):
    """One shard's rows in Postgres, for at-least-once delivery: rows in flight carry a mark id.

    A mark id is that of the leader, or one that the leader has taken in its place after a failed delivery; nobody else
    ever uses it. Once another leader has begun to lead the shard, `control` and `check_leads` raise Fenced, and `mark`
    marks nothing.
    """

    def check_leads(self) -> None:
        """Check that we lead the shard.

        Raises:
            Fenced: another leader does.
        """
        ...

    def mark(self, mark_id: str, request: ReadRequest) -> Sequence[OutboxRow]:
        """Mark the earliest rows of the request that do not carry this mark id, and return them, ascending by id.

        Returns fewer rows if they are large, or if somebody deletes some of them meanwhile; perhaps none, though there
        are others. The request need not name rows in flight, because they carry the mark id.
        """
        ...

    def has_unmarked(self, mark_id: str, request: ReadRequest) -> bool:
        """Whether there are rows that `mark` would mark."""
        ...

    def delete(self, mark_id: str, ids: Sequence[int]) -> int:
        """Delete the rows that still carry the mark id. Returns how many there were.

        Raises:
            StoreUnavailable: Postgres is away, or a trigger or a policy keeps the rows. In the second case, nobody
                marks these rows again, and nobody leads until they can be deleted.
        """
        ...

    def reset(self, mark_id: str, ids: Sequence[int]) -> None:
        """Remove the mark id from the rows that still carry it."""
        ...


class WakeUp(Protocol):
    """Writers that wake a sleeping leader, where `outbox migrate --wake-up` has installed the trigger."""

    def arm(self) -> bool:
        """Take the wake-up lock, so that writers wake us. Poll once more before you wait.

        Returns:
            False if a writer holds the lock. It began before the lock was taken, so it would not wake us.
        """
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until a writer wakes us or `interrupt` is called. Returns False after `seconds` without either."""
        ...

    def interrupt(self) -> None:
        """End a `wait` that another thread is in."""
        ...

    def disarm(self) -> None:
        """Release the wake-up lock: writers need not wake us."""
        ...

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        ...
