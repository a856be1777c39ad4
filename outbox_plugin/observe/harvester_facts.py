"""Collects, from a harvester's events, the facts by which `core.harvester_readiness` decides whether it is ready.

The threads of the harvester, of the table poller and of the HTTP server call it; a lock guards its state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from outbox_plugin.core.harvester_readiness import ShardFacts, is_alive, readiness
from outbox_plugin.core.readiness import NotReady, Readiness
from outbox_plugin.relay.events import (
    BeginsAgain,
    HarvestEvent,
    RowsRead,
    ShardStepped,
    TermBegan,
    WindowPublished,
)


class HarvesterFacts:
    """The facts about the shards of one harvester."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is the clock of the harvester's runtime."""
        self._now = now
        self._lock = threading.Lock()
        self._shards: dict[int, ShardFacts] = {}
        self._stepped_at: float | None = None
        self._begins_again: str | None = None
        self._postgres_at: float | None = None
        self._postgres_error: str | None = None
        self._not_moved: set[int] = set()  # Shards that we began to lead, and whose leader has not moved since.
        self._found_nothing: set[int] = set()  # Shards whose leader found nothing to read since `table_looked_at`.

    def observe(self, event: HarvestEvent) -> None:
        """Update the facts from an event."""
        now = self._now()
        with self._lock:
            match event:
                case ShardStepped():
                    self._stepped(event, now)
                case RowsRead():  # Proves that Postgres answers, even if no connection is left for the table poller.
                    self._postgres_at, self._postgres_error = now, None
                    if not event.rows:
                        self._found_nothing.add(event.shard)
                case TermBegan():
                    if event.shard not in self._not_moved:  # It has time to send its first rows.
                        self._moved(event.shard, now)
                        self._not_moved.add(event.shard)
                case WindowPublished() if event.rows:
                    self._moved(event.shard, now)
                case BeginsAgain():
                    self._stepped_at, self._begins_again = now, event.reason
                    self._shards.clear()
                case _:
                    pass

    def _stepped(self, event: ShardStepped, now: float) -> None:
        self._stepped_at, self._begins_again = now, None
        leads, before = event.phase == "leader", self._shards.get(event.shard, ShardFacts())
        led = [at for at in (before.led_at, event.leader_heard_at, now if leads else None) if at is not None]
        self._shards[event.shard] = replace(
            before, stepped_at=now, leads=leads, led_at=max(led, default=None), trouble=event.trouble
        )

    def _moved(self, shard: int, now: float) -> None:
        self._not_moved.discard(shard)
        self._shards[shard] = replace(self._shards.get(shard, ShardFacts()), moved_at=now)

    def table_looked_at(self, waiting: Set[int] | None, paused: Set[int]) -> None:
        """Update the facts after Postgres has answered.

        Args:
            waiting: the shards that have rows to send; None if the query took too long, as when an old snapshot keeps
                millions of purged rows. Then the leaders' own reads count.
            paused: the shards that an operator has paused.
        """
        now = self._now()
        with self._lock:
            self._postgres_at, self._postgres_error = now, None
            found_nothing, self._found_nothing = self._found_nothing, set()
            for shard, facts in self._shards.items():
                moved = shard in paused or (shard in found_nothing if waiting is None else shard not in waiting)
                known = replace(facts, paused=shard in paused)
                self._shards[shard] = known
                if moved:
                    self._moved(shard, now)

    def table_unavailable(self, error: str) -> None:
        """Postgres has not answered, or with an error; `error` is one line."""
        with self._lock:
            self._postgres_error = error

    def readiness(self) -> Mapping[int, Readiness]:
        """The readiness of each shard; only of shard 0 as long as the number of shards is unknown."""
        now = self._now()
        with self._lock:
            if self._begins_again is not None:
                return {0: NotReady(f"beginning again: {self._begins_again}")}
            known = {"postgres_at": self._postgres_at, "postgres_error": self._postgres_error}
            shards = self._shards or {0: ShardFacts()}
            return {shard: readiness(replace(shards[shard], **known), now) for shard in sorted(shards)}  # type: ignore[arg-type]

    def leads(self) -> Set[int]:
        """The shards that the harvester leads."""
        with self._lock:
            return {shard for shard, facts in self._shards.items() if facts.leads}

    def is_alive(self, *, runs: bool) -> bool:
        """Whether the supervisor works; `runs` is whether its thread is alive."""
        with self._lock:
            return is_alive(runs=runs, stepped_at=self._stepped_at, now=self._now())
