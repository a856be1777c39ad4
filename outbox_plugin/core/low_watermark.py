"""The low watermark: an id at or below which no further row can appear, so that reads skip the rows deleted there.

While any old snapshot lives (a dump, a report, a stuck session), deleted rows stay in the index, and a read from the
table's beginning walks all of them. The low watermark rests on the lock of the id sequence: a transaction that draws
an id holds that lock from before the draw to its own end. So: read the sequence's last id, then note which
transactions hold its lock. When those have ended, every row up to that id is either visible or will never exist.
Transaction ids would not do, as an id may be drawn before the transaction has one.

A row may still arrive below the low watermark, with an id that somebody chose, or one that was drawn in an earlier
transaction. A slow *sweep* from the table's beginning finds it: late, but it is never lost. Where many rows were
deleted since the last sweep, the next one walks them page by page, which takes seconds for millions of rows. There it
proceeds in slices, with a normal read between two slices. A sequence that is set back, as by TRUNCATE with RESTART
IDENTITY, takes the low watermark with it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

BEGINNING = -(2**63)  # Ids that somebody chose may be negative.
SWEEP_SECONDS = 30.0
SWEEP_BUSY_SECONDS = 300.0  # Added while many rows come, which a sweep would hold up.
SWEEP_IDS = 100_000  # Ids in a slice; it takes some 50 ms where all their rows have been deleted.
SWEEP_REST = 50.0  # After a long sweep, the next one waits for this many times its length.
_PREPARED = "-1/"  # The prefix by which Postgres shows a prepared transaction's lock. It hides whose it was.


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The last id that was drawn, and the transactions that held the sequence's lock after that was looked up."""

    last_id: int
    writers: Set[str]


class IdRange(NamedTuple):
    """The ids to read: all above `above`, up to and including `up_to` unless that is None."""

    above: int
    up_to: int | None = None


class LowWatermark:
    """What one term knows about ids whose rows are all visible or gone. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._last_id = 0
        self._settled = 0  # No further row can appear at or below this id.
        self._awaited: SequenceState | None = None
        self._watermark = BEGINNING
        self._sweep_after = 0.0
        self._swept: int | None = None  # How far the present sweep has come; None where there is none.
        self._walked = BEGINNING  # The last sweep has walked the deleted rows up to here.
        self._sweep_took, self._last_sweep_took = 0.0, 0.0

    def update(self, state: SequenceState) -> None:
        """Take in the state of the sequence: have earlier writers ended, and was the sequence set back?"""
        if state.last_id < self._last_id:
            self._settled, self._awaited = 0, None
            self.reset()
        self._last_id = state.last_id
        prepared = any(writer.startswith(_PREPARED) for writer in state.writers)
        if self._awaited and not prepared and not self._awaited.writers & state.writers:
            self._settled, self._awaited = self._awaited.last_id, None
        if self._awaited is None and not state.writers:
            self._settled = state.last_id
        elif self._awaited is None and state.last_id > self._settled:
            self._awaited = state

    @property
    def to_read(self) -> IdRange:
        """The ids of a normal read: all above the low watermark."""
        return IdRange(self._watermark)

    def read_ended(self, last_id: int | None, now: float) -> None:
        """Take in a normal read that began after the last `update`.

        Args:
            last_id: the highest id that it returned; None where it found nothing.
            now: when it ended.
        """
        reached = self._settled if last_id is None else min(self._settled, last_id)
        if self._watermark == BEGINNING:  # It has walked what a sweep would have.
            self._walked, self._sweep_after = reached, now + SWEEP_SECONDS
        self._watermark = max(self._watermark, reached)

    @property
    def sweeping(self) -> bool:
        """Whether a sweep has begun and not ended."""
        return self._swept is not None

    def slice_due(self, now: float, *, busy: bool) -> IdRange | None:
        """The slice of a sweep to read now; None where none is due. `busy`: many rows come."""
        if self._watermark == BEGINNING:
            return None
        if self._swept is None:
            if now < self._sweep_after + (SWEEP_BUSY_SECONDS if busy else 0.0):
                return None
            self._swept = BEGINNING
        if self._swept < self._walked:
            return IdRange(self._swept, self._walked)
        return IdRange(self._swept, min(self._swept + SWEEP_IDS, self._watermark))

    def slice_ended(self, slice_: IdRange, last_id: int | None, began: float, now: float) -> None:
        """Take in the read of a slice.

        Args:
            slice_: what was read.
            last_id: the highest id that it returned, behind which there may be more; None where it found nothing.
            began: when it began.
            now: when it ended.
        """
        self._sweep_took += now - began
        self._swept = slice_.up_to if last_id is None else last_id
        if self._swept is not None and self._swept >= self._watermark:
            usual = min(self._sweep_took, self._last_sweep_took)  # A single long sweep was held up by chance.
            self._sweep_after = now + max(SWEEP_SECONDS, SWEEP_REST * usual)
            self._walked, self._swept = self._watermark, None
            self._last_sweep_took, self._sweep_took = self._sweep_took, 0.0

    def reset(self) -> None:
        """Read from the table's beginning again: rows below the low watermark are wanted."""
        self._watermark, self._swept, self._walked = BEGINNING, None, BEGINNING
