"""The two sides of the harvester, as the relay sees them; real servers and a simulation both implement them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Protocol

from outbox_plugin.core.heartbeat import Heartbeat
from outbox_plugin.core.ids import IdRanges
from outbox_plugin.core.progress import Identity, ProgressRecord, Publication
from outbox_plugin.core.row import OutboxRow


class OutboxStore(Protocol):
    """The outbox in Postgres, for one term. `read` and `purge` may be called from two threads at once.

    Every method raises StoreUnavailable when Postgres does not do as asked.
    """

    @property
    def identity(self) -> Identity:
        """Who the outbox was when the term began."""
        ...

    def check_identity(self) -> None:
        """Raises StoreUnavailable when the outbox is no longer the one that the term began with."""
        ...

    def read(self, in_flight: IdRanges, limit: int) -> Sequence[OutboxRow]:
        """The earliest rows, at most `limit`, ascending by id, whose ids are not in `in_flight`.

        None when the outbox is no longer the one that the term began with.
        """
        ...

    def purge(self, publication: Publication) -> int:
        """Delete the rows that `publication` proves; durable when it returns. Returns how many rows there were."""
        ...

    def close(self) -> None:
        """Give the connections back; safe to call twice."""
        ...


class Log(Protocol):
    """Kafka, for one term of one shard.

    Methods raise LogUnavailable (nothing was published; try again), Fenced, or OutcomeUnknown.
    """

    def fence(self) -> None:
        """End every other leader's term: its open transaction is aborted and it can never commit again."""
        ...

    def read_progress(self) -> ProgressRecord | None:
        """The shard's last committed progress record; None if there is none."""
        ...

    def publish(self, rows: Sequence[OutboxRow], progress: ProgressRecord) -> None:
        """Publish `rows` in their order and `progress`, in one transaction.

        Raises:
            RowRefused: Kafka refused a row for what it is; nothing was published.
        """
        ...

    def close(self) -> None:
        """Let go of the producer; an open transaction is left to the next leader's fence. Safe to call twice."""
        ...


class Membership(Protocol):
    """The harvester's seat at the leader topic. Only `send` may be called by two threads at once."""

    def owned(self) -> Set[int]:
        """The shards whose leader-topic partitions the group coordinator has given us, as far as we know."""
        ...

    def heard(self, wait_seconds: float) -> Iterable[Heartbeat]:
        """Heartbeats that have arrived, waiting up to `wait_seconds` for the first."""
        ...

    def send(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat without waiting; one that cannot be sent in time is dropped."""
        ...

    def leave(self, timeout_seconds: float) -> None:
        """Send what is to be sent, leave the group at once, and close."""
        ...
