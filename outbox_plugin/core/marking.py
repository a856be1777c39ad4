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

from outbox_plugin.core.ordering_keys import BadRow, first_bad_rows
from outbox_plugin.core.row import OutboxRow, Rows, column, fields_of
from outbox_plugin.errors import Refusal

ROWS_PER_MARK = 5_000  # Also the throttle: no more records than that are in flight.


def rounds(rows: Sequence[OutboxRow]) -> list[Rows]:
    """`rows`, which ascend by id, as rounds: the n-th has each key's n-th row."""
    seen: dict[tuple[str, str], int] = {}
    sorted_out: list[list[tuple[Any, ...]]] = []
    lanes = zip(column(rows, "topic"), column(rows, "key"), strict=True)
    for fields, lane in zip(fields_of(rows), lanes, strict=True):
        number = seen.get(lane, 0)
        seen[lane] = number + 1
        if number == len(sorted_out):
            sorted_out.append([])
        sorted_out[number].append(fields)
    return [Rows(each) for each in sorted_out]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What follows from a round in which not every row was delivered: its bad rows, and the rows to be marked anew."""

    bad: tuple[BadRow, ...]
    reset: tuple[int, ...]


def resolve_round(
    round_: Sequence[OutboxRow], done: Set[int], refused: Mapping[int, Refusal], behind: Sequence[OutboxRow]
) -> RoundResult:
    """What follows when `round_` was sent, and the marked rows `behind` wait for it.

    Args:
        round_: what was sent.
        done: the ids of the rows that were delivered, or have become dead letters; these hold nothing up.
        refused: why the bad rows of the round that are still in the outbox are bad, by their ids.
        behind: the marked rows that were to be sent after the round.

    A row that is not done may not be overtaken. So it is marked anew, and so is all that waits: also what waits in a
    lane that is parked or held back now.
    """
    reset = [row.id for row in round_ if row.id not in done]
    if reset:
        reset += [row.id for row in behind]
    return RoundResult(tuple(first_bad_rows(round_, refused)), tuple(reset))
