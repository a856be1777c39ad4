"""What harvesters tell each other on the leader topic, and its wire form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

# candidate: is fencing and recovering; leader: harvests; resigned: has just stopped, the shard is free;
# waiting: leads nothing, and wants `trouble` to be known.
Phase = Literal["candidate", "leader", "resigned", "waiting"]

LARGEST_SHARD = 1023  # As OUTBOX_SHARDS allows.
LARGEST_LAYOUT = 2**53  # A layout's number counts up, or is a time in milliseconds since 1970.
TROUBLE_CHARACTERS = 10_000
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Name = Annotated[str, Field(max_length=1_000)]
_GOHARVESTS = re.compile(rb"[0-9]{1,20}%")  # A heartbeat of goharvest's is a time in nanoseconds, and a name.


@dataclass(frozen=True, slots=True)
class LeaderHeartbeat:
    """A harvester's sign of life for one shard. Times are ISO 8601 in UTC; `leader_id` names the term.

    `recovered`: the rows that the term found published by the last one, and deleted instead of repeating them.
    `live_first`: whether new rows go before a backlog, except `live_rows_waiting` rows, which may have a key of it.
    `stalled`, `can_replace` (the leader id of another harvester's term), `owns` and `successor` (an instance) are
    explained in `core.leadership_transfer`.
    `beat` and `after` tell a heartbeat from a copy of it: see `core.copied_heartbeats`.
    """

    shard: Annotated[int, Field(ge=0, le=LARGEST_SHARD)]
    phase: Phase
    leader_id: _Name
    instance: _Name
    host: _Name
    pid: _Count
    since: _Name
    incarnation: _Name
    place: _Name
    layout: Annotated[int, Field(ge=0, le=LARGEST_LAYOUT)] = 0
    published: _Count = 0
    records_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    trouble: Annotated[str | None, Field(max_length=TROUBLE_CHARACTERS)] = None
    recovered: _Count = 0
    live_first: bool = False
    live_rows_waiting: _Count = 0
    stalled: bool = False
    can_replace: _Name = ""
    owns: bool = False
    successor: _Name = ""
    beat: _Count = 0
    after: Annotated[int, Field(ge=-1, lt=2**63)] = -1

    def encode(self) -> bytes:
        """The heartbeat as JSON, for `parse`. A long trouble is cut, and what is not a text in it is replaced."""
        trouble = self.trouble and self.trouble[:TROUBLE_CHARACTERS].encode(errors="replace").decode()
        fields = {name: getattr(self, name) for name in _FIELDS} | {"trouble": trouble}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, body: bytes | None) -> LeaderHeartbeat | None:
        """The heartbeat that `body` encodes; None for anything else, which others may write to the topic.

        Further fields, of a later version, are ignored.
        """
        try:
            return _HEARTBEAT.validate_json(body or b"", strict=True)
        except ValidationError:
            return None


_FIELDS = tuple(field.name for field in fields(LeaderHeartbeat))
_HEARTBEAT = TypeAdapter(LeaderHeartbeat)


def is_goharvests(body: bytes | None) -> bool:
    """Whether the record may be a heartbeat of goharvest's, which shares the topic with us where that is asked for."""
    return _GOHARVESTS.match(body or b"") is not None
