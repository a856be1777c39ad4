"""At-least-once: which marked rows may be sent now, and what follows from what became of them.

The rules are goharvest's mark-purge/reset (its design page, "Mark-Purge/Reset"): rows in flight carry the leader's id;
a key has at most one record in flight (the barrier), so a record that is sent again can be repeated, but never
overtaken; a delivered row is purged; after a failed delivery all that is not delivered is reset, and marked anew under
a leader id that was never used before. Here each step is taken for many rows at once.

What is in flight is a *round*: rows no two of which share a key of a topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outbox_plugin.core.lanes import BadRow, first_bad_rows
from outbox_plugin.core.ports import Sent
from outbox_plugin.core.row import OutboxRow, Rows, column, fields_of

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
class Verdict:
    """What follows from a round in which not every row was delivered: its bad rows, and the rows to be marked anew."""

    bad: tuple[BadRow, ...]
    reset: tuple[int, ...]


def judge(round_: Sequence[OutboxRow], sent: Sent, behind: Sequence[OutboxRow], *, bury: bool) -> Verdict:
    """What follows when `round_` was `sent`, and the marked rows `behind` wait for it.

    A row that was neither delivered nor refused is unknown: it and all that waits is marked anew, so that nothing
    overtakes it. So is what waits in a lane that is parked now; bad rows that are to be buried hold nothing up.
    """
    unknown = [row.id for row in round_ if row.id not in sent.delivered and row.id not in sent.refused]
    waiting = [row.id for row in behind]
    if bury:
        bad = [BadRow(row, sent.refused[row.id]) for row in round_ if row.id in sent.refused]
        return Verdict(tuple(bad), (*unknown, *waiting) if unknown else ())
    refused = [row.id for row in round_ if row.id in sent.refused]
    return Verdict(tuple(first_bad_rows(round_, sent.refused)), (*unknown, *refused, *waiting))
