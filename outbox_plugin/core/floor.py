"""The floor: an id under which no row can appear any more, so that reads need not walk the rows deleted there.

While any old snapshot lives (a dump, a report, a stuck session), deleted rows stay in the index, and a read from its
beginning walks all of them. The floor rests on the sequence's lock: who draws an id holds it from before the draw to
the end of the transaction. So once every transaction that held the lock when the last drawn id was looked up has ended,
all rows up to that id that will ever be are visible. Transaction ids would not do: an id is drawn before there is one.

A row that arrives below the floor all the same (with an id of its own making, or one drawn in an earlier transaction)
is found by a slow sweep, which starts at the beginning: late, never lost. Where rows were deleted since the last one,
it walks them for the first time, page by page: seconds where there were millions. There it goes in slices, with a read
from the floor after each. A sequence that is set back, as by TRUNCATE with RESTART IDENTITY, takes the floor with it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

BEGINNING = -(2**63)  # Ids of somebody's own making may be negative.
SWEEP_SECONDS = 30.0
SWEEP_BUSY_SECONDS = 300.0  # So much later while rows come in masses, which it would hold up.
SWEEP_IDS = 100_000  # A slice; some 50 ms where all of them have been deleted.
SWEEP_REST = 50.0  # Where sweeps take long, the next one waits for as many times their length.
_PREPARED = "-1/"  # How Postgres shows the locks of a prepared transaction; whose it was, it does not say.


@dataclass(frozen=True, slots=True)
class Drawn:
    """The last id that was drawn, and the transactions that held the sequence's lock after that was looked up."""

    last_id: int
    writers: Set[str]


class Span(NamedTuple):
    """The ids to read: those above `floor`, and up to `until` if it is not None."""

    floor: int
    until: int | None = None


class Floor:
    """What one term knows about the ids that are over and done with. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._last_id = 0
        self._settled = 0  # No row with such an id, or a lower one, can appear any more.
        self._awaited: Drawn | None = None
        self._floor = BEGINNING
        self._sweep_after = 0.0
        self._swept: int | None = None  # How far the sweep has come, if one has begun.
        self._walked = BEGINNING  # What was deleted up to here, the last sweep has walked.
        self._sweep_took, self._last_sweep_took = 0.0, 0.0

    def learned(self, drawn: Drawn) -> None:
        """Look whether the writers of an earlier look have ended, and whether ids are drawn from the start again."""
        if drawn.last_id < self._last_id:
            self._settled, self._awaited = 0, None
            self.reset()
        self._last_id = drawn.last_id
        prepared = any(writer.startswith(_PREPARED) for writer in drawn.writers)
        if self._awaited and not prepared and not self._awaited.writers & drawn.writers:
            self._settled, self._awaited = self._awaited.last_id, None
        if self._awaited is None and not drawn.writers:
            self._settled = drawn.last_id
        elif self._awaited is None and drawn.last_id > self._settled:
            self._awaited = drawn

    @property
    def span(self) -> Span:
        """What is to be read: all from the floor on."""
        return Span(self._floor)

    def read(self, last_id: int | None, now: float) -> None:
        """A read from the floor on, begun when all was learned that is, ended with `last_id` or found nothing."""
        reached = self._settled if last_id is None else min(self._settled, last_id)
        if self._floor == BEGINNING:  # So the read has walked what a sweep would have.
            self._walked, self._sweep_after = reached, now + SWEEP_SECONDS
        self._floor = max(self._floor, reached)

    @property
    def sweeping(self) -> bool:
        """Whether a sweep has begun and not ended."""
        return self._swept is not None

    def slice_due(self, now: float, *, busy: bool) -> Span | None:
        """What of a sweep is to be read now, if anything is. `busy`: rows come in masses."""
        if self._floor == BEGINNING:
            return None
        if self._swept is None:
            if now < self._sweep_after + (SWEEP_BUSY_SECONDS if busy else 0.0):
                return None
            self._swept = BEGINNING
        if self._swept < self._walked:
            return Span(self._swept, self._walked)
        return Span(self._swept, min(self._swept + SWEEP_IDS, self._floor))

    def swept(self, slice_: Span, last_id: int | None, began: float, now: float) -> None:
        """A read of `slice_` ended with `last_id`, behind which more may be, or found nothing."""
        self._sweep_took += now - began
        self._swept = slice_.until if last_id is None else last_id
        if self._swept is not None and self._swept >= self._floor:
            usual = min(self._sweep_took, self._last_sweep_took)  # One that was long by itself was held up by chance.
            self._sweep_after = now + max(SWEEP_SECONDS, SWEEP_REST * usual)
            self._walked, self._swept = self._floor, None
            self._last_sweep_took, self._sweep_took = self._sweep_took, 0.0

    def reset(self) -> None:
        """Rows below the floor are wanted again."""
        self._floor, self._swept, self._walked = BEGINNING, None, BEGINNING
