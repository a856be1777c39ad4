"""What one tick of the harvester's sensor leaves for the next. Pure: what is seen comes in, what changed goes out."""

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
    """What a process has used: CPU in seconds since it began, memory in bytes now."""

    pid: int
    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A topic's end, summed over its partitions, how far it has moved since it was last seen, and how fast."""

    offset: int
    by: int
    per_second: float


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Cursor:
    """What was seen last. Times are seconds since the epoch.

    `leaders`: the term of each shard; `takeovers`: how often one followed another; `suppressed`: the rows that new
    leaders found published, and did not repeat; `troubled_since`: 0 when all is well; `offsets`: the topics' ends;
    `moving`: those that had moved.
    """

    at: _Seconds = 0.0
    leaders: Mapping[str, str] = field(default_factory=dict)
    takeovers: _Count = 0
    troubled_since: _Seconds = 0.0
    offsets: Mapping[str, _Count] = field(default_factory=dict)
    moving: tuple[str, ...] = ()
    pid: _Count = 0
    cpu_seconds: _Seconds = 0.0
    suppressed: _Count = 0

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
        """What was seen last, once `status` has been."""
        heard = {str(shard.shard): (shard.leader.leader_id, shard.recovered) for shard in status.shards if shard.leader}
        terms = {shard: term for shard, (term, _) in heard.items()}
        return replace(
            self,
            at=now,
            leaders={**self.leaders, **terms},
            takeovers=self.takeovers + sum(self.leaders.get(shard, term) != term for shard, term in terms.items()),
            suppressed=self.suppressed
            + sum(rows for shard, (term, rows) in heard.items() if self.leaders.get(shard) != term),
            troubled_since=(self.troubled_since or now) if troubled else 0.0,
        )

    def moved(self, ends: Mapping[str, int], now: float) -> tuple[Cursor, dict[str, Moved]]:
        """The cursor with the topics' new ends, and what there is to tell: topics that moved or have just stopped to.

        A topic that is seen for the first time is told of once, as if it had not moved. One that was made anew has
        moved by all that it holds.
        """
        told = {}
        seconds = max(now - self.at, 0.001)
        for topic, end in ends.items():
            before = self.offsets.get(topic, end)
            by = end - before if end >= before else end
            if by or topic in self.moving or topic not in self.offsets:
                told[topic] = Moved(end, by, by / seconds)
        moving = tuple(sorted(topic for topic, moved in told.items() if moved.by))
        return replace(self, offsets={**self.offsets, **ends}, moving=moving), told

    def used(self, use: Use | None, now: float) -> tuple[Cursor, float | None]:
        """The cursor with what the daemon has used, and its CPU in percent of a core since it was last seen."""
        if use is None:
            return replace(self, pid=0, cpu_seconds=0.0), None
        since = max(now - self.at, 0.001)
        percent = 100 * (use.cpu_seconds - self.cpu_seconds) / since if use.pid == self.pid else None
        return replace(self, pid=use.pid, cpu_seconds=use.cpu_seconds), percent


_CURSOR = TypeAdapter(Cursor)
