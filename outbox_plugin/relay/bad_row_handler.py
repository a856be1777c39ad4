"""Parks or dead-letters bad rows, and holds keys back, in either delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from outbox_plugin.core.bad_rows import BadRow, without
from outbox_plugin.core.intervals import RETRY_BAD_ROW_SECONDS
from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.oversize_backoff import OversizeBackoff
from outbox_plugin.core.postgres_ports import ShardStore
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import Away, Refusal
from outbox_plugin.relay.events import KeysHeld, Observer, RowsDeadLettered, RowsParked, held_topics
from outbox_plugin.relay.runtime import Lock, Runtime
from outbox_plugin.relay.timed_calls import AnswerWait


@dataclass(frozen=True, slots=True)
class BadRowHandler:
    """Belongs to the stage that sends.

    Args:
        shard: for the events that are observed.
        store: parks and dead-letters rows.
        store_wait: lasts while the store does so.
        runtime: has the clock.
        observe: is told of rows that are parked or dead-lettered, and of keys that are held back.
        lock: is held while `note_parked` or `note_held` is called.
        note_parked: takes in that the database has parked the keys of bad rows.
        note_held: holds keys back, each until its time.
        oversize_backoff: decides how long rows wait that may be too large.
    """

    shard: int
    store: ShardStore
    store_wait: AnswerWait
    runtime: Runtime
    observe: Observer
    lock: Lock
    note_parked: Callable[[Sequence[BadRow]], None]
    note_held: Callable[[Mapping[OrderingKey, float]], None]
    oversize_backoff: OversizeBackoff = field(default_factory=OversizeBackoff)

    def park(self, bad: Sequence[BadRow]) -> None:
        """Park bad rows. Where the database refuses to park one, its key is held back and tried again."""
        with self.store_wait:
            unrecorded = self.store.park(bad) if bad else ()
        parked = without(bad, unrecorded)
        with self.lock:
            self.note_parked(parked)
            again_at = self.runtime.now() + RETRY_BAD_ROW_SECONDS
            self.note_held({row.ordering_key: again_at for row in unrecorded})
        if parked:
            self.observe(RowsParked(self.shard, tuple(parked)))
        for row in unrecorded:
            self.observe(KeysHeld(self.shard, (row.ordering_key,), row.refusal.reason, RETRY_BAD_ROW_SECONDS))

    def dead_letter(self, bad: Sequence[BadRow]) -> dict[int, Refusal]:
        """Make bad rows dead letters. Returns the refusals of those that the database refuses to move."""
        with self.store_wait:
            stuck = self.store.dead_letter(bad)
        dead = without(bad, stuck)
        if dead:
            self.observe(RowsDeadLettered(self.shard, tuple(dead)))
        return {row.row.id: row.refusal for row in stuck}

    def hold_maybe_oversize(self, rows: Iterable[OutboxRow]) -> None:
        """Leave the keys of rows that may be too large in the table for a while, so that other rows need not wait."""
        if keys := list(dict.fromkeys(map(OrderingKey.of, rows))):
            now = self.runtime.now()
            seconds = self.oversize_backoff.next_delay(now)
            with self.lock:
                self.note_held(dict.fromkeys(keys, now + seconds))
            reason = f"Kafka refused a row of this size or smaller as too large; {len(keys)} key(s) wait for a retry"
            self.observe(KeysHeld(self.shard, tuple(keys[:1]), reason, seconds))

    def hold(self, topics: Mapping[str, Away]) -> None:
        """Leave rows of topics that are away in the table for a while, so that the others can be sent."""
        now = self.runtime.now()
        with self.lock:
            self.note_held({OrderingKey(topic, None): now + away.seconds for topic, away in topics.items()})
        for event in held_topics(self.shard, topics):
            self.observe(event)
