"""What harvesters tell each other on the leader topic, and its wire form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

# candidate: is fencing and recovering; leader: harvests; resigned: has just stopped, the shard is free;
# waiting: leads nothing, and wants `trouble` to be known.
Phase = Literal["candidate", "leader", "resigned", "waiting"]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A harvester's sign of life for one shard. Times are ISO 8601 in UTC; `leader_id` names the term.

    `recovered`: the rows that the term found published by the last one, and deleted instead of repeating them.
    """

    shard: int
    phase: Phase
    leader_id: str
    instance: str
    host: str
    pid: int
    since: str
    incarnation: str
    place: str
    layout: int = 0
    published: int = 0
    records_per_second: float = 0.0
    trouble: str | None = None
    recovered: int = 0

    def encode(self) -> bytes:
        """The heartbeat as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, body: bytes | None) -> Heartbeat | None:
        """The heartbeat that `body` encodes; None for anything else, which others may write to the topic.

        What a later version says beyond these fields is left out: it is heard all the same.
        """
        try:
            said = json.loads(body or b"")
            known = {each.name: said[each.name] for each in fields(cls) if each.name in said}
            return cls(**known) if said["phase"] in get_args(Phase) else None
        except (ValueError, TypeError, KeyError):
            return None
