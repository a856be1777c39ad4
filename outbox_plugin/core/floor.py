"""The floor: an id under which no row can appear any more, so that reads need not walk the rows deleted there.

While any old snapshot lives (a dump, a report, a stuck session), deleted rows stay in the index, and a read from its
beginning walks all of them. The floor rests on the sequence's lock: who draws an id holds it from before the draw to
the end of the transaction. So once every transaction that held the lock when the last drawn id was looked up has ended,
all rows up to that id that will ever be are visible. Transaction ids would not do: an id is drawn before there is one.

A row that arrives below the floor all the same (with an id of its own making, or one drawn in an earlier transaction)
is found by a slow sweep, which starts at the beginning: late, never lost. A sequence that is set back, as by TRUNCATE
with RESTART IDENTITY, takes the floor with it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

BEGINNING = -(2**63)  # Ids of somebody's own making may be negative.
SWEEP_SECONDS = 30.0
SWEEP_REST = 50.0  # Where sweeps take long, the next one waits for as many times their length.
_PREPARED = "-1/"  # How Postgres shows the locks of a prepared transaction; whose it was, it does not say.


@dataclass(frozen=True, slots=True)
class Drawn:
    """The last id that was drawn, and the transactions that held the sequence's lock after that was looked up."""

    last_id: int
    writers: Set[str]


class Floor:
    """What one term knows about the ids that are over and done with. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._last_id = 0
        self._settled = 0  # No row with such an id, or a lower one, can appear any more.
        self._awaited: Drawn | None = None
        self._floor = BEGINNING
        self._sweep_after = 0.0
        self._swept = BEGINNING  # How far the sweep has come.
        self._sweep_took = 0.0

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
    def settled(self) -> int:
        """The highest id that a read which begins now may raise the floor to."""
        return self._settled

    def start_of_read(self, now: float) -> int:
        """The id behind which the next read is to begin: the floor, or where a sweep that is due has come."""
        return self._swept if now >= self._sweep_after else self._floor

    def read(self, began_behind: int, settled: int, last_id: int | None, began: float, now: float) -> None:
        """A read that began behind `began_behind`, when `settled` was known, ended with `last_id` or found nothing."""
        if last_id is not None and last_id < self._floor:
            self._swept = last_id  # More may be behind it, and need not wait for the next sweep.
        elif began_behind < self._floor or began_behind == BEGINNING:
            took = now - began
            usual = min(took, self._sweep_took)  # One that was long by itself was held up by something else.
            self._swept, self._sweep_after = BEGINNING, now + max(SWEEP_SECONDS, SWEEP_REST * usual)
            self._sweep_took = took
        reached = settled if last_id is None else min(settled, last_id)
        self._floor = max(self._floor, reached)

    def reset(self) -> None:
        """Rows below the floor are wanted again."""
        self._floor, self._sweep_after, self._swept = BEGINNING, 0.0, BEGINNING
