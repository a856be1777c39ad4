"""At-least-once: which marked rows may be sent now, and which are parked or reset after the result.

The rules are goharvest's mark-purge/reset (its design page, "Mark-Purge/Reset"): rows in flight carry the leader's id;
a key has at most one record in flight (the barrier), so a record can be repeated, but no later record of its key
overtakes it; a delivered row is purged; after a failed delivery, all rows that were not delivered are reset, and marked
again with a leader id that was never used before. Here each step is taken for many rows at once.

The rows in flight are a *round*: no two of them have the same key of the same topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from outbox_plugin.core.bad_rows import BadRow, first_bad_rows
from outbox_plugin.core.row import OutboxRow, Rows, column, fields_of
from outbox_plugin.errors import Refusal

ROWS_PER_MARK = 5_000  # It is also the highest number of records in flight.


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
    """What to do after a round: the bad rows to park, and the ids of the rows to reset and mark again."""

    bad: tuple[BadRow, ...]
    reset: tuple[int, ...]


def resolve_round(
    round_: Sequence[OutboxRow], done: Set[int], refused: Mapping[int, Refusal], behind: Sequence[OutboxRow]
) -> RoundResult:
    """Decide what to do after `round_` was sent, while the marked rows `behind` wait for it.

    No row may overtake a row that is not done. So that row is marked again, and so are all rows that wait, those of
    keys that are parked or held back now included.

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
