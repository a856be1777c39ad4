"""At-least-once: which marked rows may be sent now, and what follows from what became of them.

The rules are goharvest's mark-purge/reset (its design page, "Mark-Purge/Reset"): rows in flight carry the leader's id;
a key has at most one record in flight (the barrier), so a record that is sent again can be repeated, but never
overtaken; a delivered row is purged; after a failed delivery all that is not delivered is reset, and marked anew under
a leader id that was never used before. Here each step is taken for many rows at once.

What is in flight is a *round*: rows no two of which share a key of a topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from outbox_plugin.core.bad_rows import BadRow, first_bad_rows
from outbox_plugin.core.row import OutboxRow, Rows, column, fields_of
from outbox_plugin.errors import Refusal

ROWS_PER_MARK = 5_000  # Also the throttle: no more records than that are in flight.


def rounds(rows: Sequence[OutboxRow]) -> list[Rows]:
    """Split `rows`, which ascend by id, into rounds: the n-th round has the n-th row of each key."""
    seen: dict[tuple[str, str], int] = {}
    fields_by_round: list[list[tuple[Any, ...]]] = []
    keys = zip(column(rows, "topic"), column(rows, "key"), strict=True)
    for fields, key in zip(fields_of(rows), keys, strict=True):
        number = seen.get(key, 0)
        seen[key] = number + 1
        if number == len(fields_by_round):
            fields_by_round.append([])
        fields_by_round[number].append(fields)
    return [Rows(round_) for round_ in fields_by_round]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What follows from a round: the bad rows to park, and the ids of the rows to mark anew."""

    bad: tuple[BadRow, ...]
    reset: tuple[int, ...]


def resolve_round(
    round_: Sequence[OutboxRow], done: Set[int], refused: Mapping[int, Refusal], behind: Sequence[OutboxRow]
) -> RoundResult:
    """What follows after `round_` was sent, while the marked rows `behind` wait for it.

    No row may overtake a row that is not done. So that row is marked anew, and all rows that wait with it are too, also
    those of keys that are parked or held back now.

    Args:
        round_: what was sent.
        done: the ids of the rows that were delivered or dead-lettered.
        refused: by id, why rows of the round that are still in the outbox are bad.
        behind: the marked rows that were to be sent after the round.
    """
    reset = [row.id for row in round_ if row.id not in done]
    if reset:
        reset += [row.id for row in behind]
    return RoundResult(tuple(first_bad_rows(round_, refused)), tuple(reset))
