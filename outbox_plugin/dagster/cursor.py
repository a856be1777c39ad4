"""The cursor of the harvester's sensor: what one tick keeps for the next. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from outbox_plugin.status.reader import Status

_Seconds = Annotated[float, Field(ge=0, le=2**53, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True, slots=True)
class Use:
    """A process's use of CPU, in seconds since it started, and of memory, in bytes."""

    pid: int
    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The move of a topic's end since the last tick.

    Attributes:
        offset: the end now, summed over the partitions.
        by: how many offsets it has moved.
        per_second: how many offsets it has moved per second.
    """

    offset: int
    by: int
    per_second: float


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Cursor:
    """The state that the last tick saw. Times are seconds since the epoch.

    Attributes:
        at: the time of the tick.
        leaders: the leader's term of each shard.
        takeovers: how often a shard's leader has changed.
        troubled_since: when the present trouble began; 0 if there is none.
        offsets: the end of each topic.
        moving: the topics that had moved.
        pid: the daemon's process id; 0 if there is none.
        cpu_seconds: the CPU that this process has used.
        recovered_rows: rows that new leaders found already published, and did not publish again.
    """

    at: _Seconds = 0.0
    leaders: Mapping[str, str] = field(default_factory=dict)
    takeovers: _Count = 0
    troubled_since: _Seconds = 0.0
    offsets: Mapping[str, _Count] = field(default_factory=dict)
    moving: tuple[str, ...] = ()
    pid: _Count = 0
    cpu_seconds: _Seconds = 0.0
    recovered_rows: _Count = 0

    @classmethod
    def parse(cls, text: str | None) -> Cursor:
        """The cursor that `text` encodes; an empty one for anything else, such as another version's."""
        try:
            return _CURSOR.validate_json(text or "", strict=True)
        except (ValidationError, UnicodeEncodeError):
            return cls()

    def encode(self) -> str:
        """The cursor as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def after(self, status: Status, now: float, *, troubled: bool) -> Cursor:
        """The cursor after a tick.

        Args:
            status: what the tick saw.
            now: seconds of the wall clock.
            troubled: whether the harvester's health is not good.
        """
        heard = {
            str(shard.shard): (shard.leader.leader_id, shard.recovered_rows) for shard in status.shards if shard.leader
        }
        terms = {shard: term for shard, (term, _) in heard.items()}
        return replace(
            self,
            at=now,
            leaders={**self.leaders, **terms},
            takeovers=self.takeovers + sum(self.leaders.get(shard, term) != term for shard, term in terms.items()),
            recovered_rows=self.recovered_rows
            + sum(rows for shard, (term, rows) in heard.items() if self.leaders.get(shard) != term),
            troubled_since=(self.troubled_since or now) if troubled else 0.0,
        )

    def moved(self, ends: Mapping[str, int], now: float) -> tuple[Cursor, dict[str, Moved]]:
        """The cursor with the topics' new ends, and the moves to report.

        A topic is reported when it moves, once when it has stopped, and once, as not moved, when it is first seen. A
        topic that was deleted and created again has moved by all that it holds.

        Args:
            ends: the end of each topic, summed over its partitions.
            now: in seconds since the epoch.
        """
        moves = {}
        seconds = max(now - self.at, 0.001)
        for topic, end in ends.items():
            before = self.offsets.get(topic, end)
            by = end - before if end >= before else end
            if by or topic in self.moving or topic not in self.offsets:
                moves[topic] = Moved(end, by, by / seconds)
        moving = tuple(sorted(topic for topic, move in moves.items() if move.by))
        return replace(self, offsets={**self.offsets, **ends}, moving=moving), moves

    def used(self, use: Use | None, now: float) -> tuple[Cursor, float | None]:
        """The cursor with the daemon's use, and its CPU since the last tick in percent of a core."""
        if use is None:
            return replace(self, pid=0, cpu_seconds=0.0), None
        since = max(now - self.at, 0.001)
        percent = 100 * (use.cpu_seconds - self.cpu_seconds) / since if use.pid == self.pid else None
        return replace(self, pid=use.pid, cpu_seconds=use.cpu_seconds), percent


_CURSOR = TypeAdapter(Cursor)
