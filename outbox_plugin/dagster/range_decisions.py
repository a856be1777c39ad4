"""Decides, on each tick of a topic's sensor, whether to request a run for the next range. No I/O.

Postgres has the position up to which records have been consumed. Dagster knows the unfinished runs. The cursor only
remembers since when records wait, and how many runs ended without effect. If the cursor is lost, a range is requested
a little later or sooner, and nothing else changes.

    a run of the consumer is unfinished, or will be retried     wait
    nothing waits                                               nothing
    too little waits, and not for long                          wait
    the last run from this position ended without effect        wait: 30 s, then twice as long each time, up to an hour
    else                                                        request the next range
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from outbox_plugin.core.topic_ranges import Planned, Position, TopicRange

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 30.0, 3600.0
_Seconds = Annotated[float, Field(ge=0, le=2**53, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Memory:
    """What one tick keeps for the next. Times are seconds since the epoch, 0 where there is none.

    Attributes:
        place: a digest of the consumer's position.
        waiting_since: when a tick first saw records wait at this position.
        requests: how many runs were requested from this position.
        busy_at: when a run was last requested, or seen unfinished.
    """

    place: str = ""
    waiting_since: _Seconds = 0.0
    requests: _Count = 0
    busy_at: _Seconds = 0.0

    @classmethod
    def parse(cls, text: str | None) -> Memory:
        """The memory that `text` encodes; an empty one for anything else, such as another version's."""
        try:
            return _MEMORY.validate_json(text or "", strict=True)
        except (ValidationError, UnicodeEncodeError):
            return cls()

    def encode(self) -> str:
        """As a cursor."""
        return json.dumps(asdict(self), separators=(",", ":"))


_MEMORY = TypeAdapter(Memory)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a range.

    Attributes:
        max_records: the most offsets in a range.
        max_wait_seconds: how long the first record of a smaller range waits before a run is requested.
    """

    max_records: int
    max_wait_seconds: float


@dataclass(frozen=True, slots=True)
class RangeDecision:
    """What a tick does.

    Attributes:
        range: the range to request; None requests nothing.
        why: the reason, which the tick shows.
        memory: what the next tick needs.
        waited_seconds: how long the first record has waited.
    """

    range: TopicRange | None
    why: str
    memory: Memory
    waited_seconds: float = 0.0


def decide(
    memory: Memory, position: Position | None, planned: Planned, unfinished: str | None, bounds: Bounds, now: float
) -> RangeDecision:
    """Decide whether to request `planned`, the next range.

    Args:
        memory: what the last tick left.
        position: where the consumer stands; None where it has consumed nothing yet.
        planned: the next range, of at most `bounds.max_records` offsets.
        unfinished: describes a run of the consumer that may still commit; None if there is none.
        bounds: when a range is requested.
        now: in seconds since the epoch.
    """
    place = _place(position)
    if place != memory.place:
        memory = Memory(place)
    waiting = planned.range is not None
    memory = replace(memory, waiting_since=min(memory.waiting_since or now, now) if waiting else 0.0)
    waited = max(0.0, now - memory.waiting_since) if waiting else 0.0
    if unfinished:
        return RangeDecision(None, unfinished, replace(memory, busy_at=now), waited)
    if planned.range is None:
        return RangeDecision(None, "everything has been consumed", memory)
    if memory.requests:
        pause = min(FIRST_RETRY_SECONDS * 2 ** min(memory.requests - 1, 20), LAST_RETRY_SECONDS)
        if 0 <= now - memory.busy_at < pause:
            why = f"{memory.requests} runs from this position ended without effect; the next one is due in "
            return RangeDecision(None, f"{why}{pause - (now - memory.busy_at):.0f} s", memory, waited)
    elif planned.lag < bounds.max_records and waited < bounds.max_wait_seconds and not planned.lost:
        why = f"{planned.lag} offsets wait for up to {bounds.max_wait_seconds - waited:.0f} s more"
        return RangeDecision(None, why, memory, waited)
    requested = replace(memory, requests=memory.requests + 1, busy_at=now)
    return RangeDecision(
        planned.range, f"requested {planned.range.offsets} of {planned.lag} offsets", requested, waited
    )


def _place(position: Position | None) -> str:
    """A short digest of a position."""
    if position is None:
        return ""
    whole = json.dumps([position.topic_id, sorted(position.next_offsets.items())])
    return sha256(whole.encode()).hexdigest()[:32]
