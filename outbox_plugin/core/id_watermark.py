"""The id watermark: no row with an id at or below it can still appear from the id sequence, so reads start above it.

While any old snapshot lives (a dump, a report, a stuck session), deleted rows stay in the index, and a read from the
table's beginning walks all of them. The id watermark rests on the lock of the id sequence: a transaction that draws
an id holds that lock from before the draw to its own end. So: read the sequence's last id, then note which
transactions hold its lock. When those have ended, every row up to that id is either visible or will never exist.
Transaction ids cannot serve instead: a transaction may draw a row's id before Postgres gives it a transaction id.

A row may still arrive below the id watermark, with an id that somebody chose, or one that was drawn in an earlier
transaction. A slow *sweep* from the table's beginning finds it: late, but it is never lost. Where many rows were
deleted since the last sweep, the next one walks them page by page, which takes seconds for millions of rows. The sweep
therefore reads slices, with a normal read between two slices. A sequence that is set back, as by TRUNCATE with RESTART
IDENTITY, takes the id watermark with it.

Where live rows are read before a backlog, as `core.backlog` decides, there are two watermarks: that of the backlog,
and that of the live rows above it. Sweeps stay below the first.

A large transaction that stays open holds the id watermark where it is, and each read would walk all rows that it has
written by then. So a read passes over the ids that only such transactions can still commit rows of: see `OpenWriters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

BEGINNING = -(2**63)  # Below every id: an id that somebody chose may be negative.
SWEEP_SECONDS = 30.0
SWEEP_BUSY_SECONDS = 300.0  # Added while many rows come, because a sweep would delay them.
SWEEP_IDS = 100_000  # Ids in a slice. Its read takes about 50 ms if all their rows have been deleted.
SWEEP_REST = 50.0  # After a long sweep, the next one waits for this many times its length.
_PREPARED = "-1/"  # Postgres shows the lock of a transaction that was prepared before its restart with this prefix.


BULK_IDS = 1_000  # More ids between two updates mean a large transaction: single events draw far fewer.
PASS_OVER_SECONDS = 300.0  # After this time, ids that were passed over are read once: somebody may have chosen one.
_XIDS = 2**32


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The last id that was drawn, and `writers`: the transactions that then held the sequence's lock.

    `transaction_ids` has the transaction id, with its epoch, of each writer that has one.
    """

    last_id: int
    writers: Set[str]
    transaction_ids: Mapping[str, int] = field(default_factory=dict)


class OpenWriters(NamedTuple):
    """All rows with ids up to `up_to` have been read, except the rows of the transactions with these ids.

    A read may pass over these ids if all of the transactions are open in its own snapshot. If one is not, its rows may
    be visible, and must be read before any later row.
    """

    up_to: int
    transaction_ids: tuple[int, ...]


class IdRange(NamedTuple):
    """The ids to read: all above `above`, up to and including `up_to` unless that is None.

    Ids up to `open_writers.up_to` need not be read while the transactions of `open_writers` are open.
    """

    above: int
    up_to: int | None = None
    open_writers: OpenWriters | None = None


def with_epoch(transaction_id: int, next_id: int) -> int:
    """The full id of a transaction that is known by the lower 32 bits of it.

    Args:
        transaction_id: as locks show it.
        next_id: the full id of a transaction of about now.
    """
    return next_id + (transaction_id - next_id + _XIDS // 2) % _XIDS - _XIDS // 2


class IdWatermark:
    """What one term knows about ids whose rows are all visible or gone. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._state = SequenceState(0, frozenset())
        self._settled = 0  # No further row can appear at or below this id.
        self._awaited: SequenceState | None = None
        self._watermark = BEGINNING
        self._bound: int | None = None  # The last id of the backlog; None where the reads are not split.
        self._live_watermark = BEGINNING
        self._may_be_open: OpenWriters | None = None  # The writers whose rows a read that begins now may not see.
        self._grows_in_bulk = False
        self._open_writers: OpenWriters | None = None  # Whose ids the next read of the newest rows passes over.
        self._read_all_after = 0.0
        self._sweep_after = 0.0
        self._swept: int | None = None  # How far the present sweep has come; None where there is none.
        self._walked = BEGINNING  # The last sweep has walked the deleted rows up to here.
        self._sweep_took, self._last_sweep_took = 0.0, 0.0

    def update(self, state: SequenceState) -> bool:
        """Take in the state of the sequence, and find which writers have ended. Returns whether it was set back."""
        before, self._state = self._state, state
        if is_set_back := state.last_id < before.last_id:
            self._settled, self._awaited, self._bound = 0, None, None
            self.reset()
            before = SequenceState(0, frozenset())
        prepared = any(writer.startswith(_PREPARED) for writer in state.writers)
        open_writers = before.writers & state.writers
        if not prepared and not open_writers:
            self._settled = max(self._settled, before.last_id)
        if self._awaited and not prepared and not self._awaited.writers & state.writers:
            self._settled, self._awaited = max(self._settled, self._awaited.last_id), None
        if self._awaited is None and not state.writers:
            self._settled = state.last_id
        elif self._awaited is None and state.last_id > self._settled:
            self._awaited = state
        self._grows_in_bulk = bool(open_writers) and state.last_id - before.last_id > BULK_IDS
        self._may_be_open = None
        if open_writers and not prepared and open_writers <= state.transaction_ids.keys():
            transaction_ids = tuple(sorted(state.transaction_ids[writer] for writer in open_writers))
            self._may_be_open = OpenWriters(before.last_id, transaction_ids)
        return is_set_back

    @property
    def settled(self) -> int:
        """The id at or below which no further row can appear; it is not below the id watermark."""
        return self._settled

    @property
    def last_drawn(self) -> int:
        """The last id that was drawn."""
        return self._state.last_id

    @property
    def bound(self) -> int | None:
        """The last id of the backlog; None where the reads are not split."""
        return self._bound

    @property
    def is_split(self) -> bool:
        """Whether live rows are read before a backlog."""
        return self._bound is not None

    def split(self, bound: int) -> None:
        """Read the rows up to `bound`, the backlog, apart from the live rows above it."""
        self._bound = self._live_watermark = bound
        self._open_writers = None

    def join(self) -> None:
        """Read all rows in the order of their ids again."""
        self._bound = self._open_writers = None

    @property
    def to_read(self) -> IdRange:
        """The ids of a normal read: all above the id watermark, or those of the backlog where the reads are split."""
        if self._bound is not None:
            return IdRange(self._watermark, self._bound)
        return IdRange(self._watermark, None, self._open_writers)

    @property
    def live_to_read(self) -> IdRange:
        """The ids of a read of live rows, where the reads are split."""
        return IdRange(self._live_watermark, None, self._open_writers)

    @property
    def grows_in_bulk(self) -> bool:
        """Whether an open transaction draws many ids. Frequent updates let reads pass over the rows that it writes."""
        return self._grows_in_bulk

    def live_read_ended(self, last_id: int | None, now: float) -> None:
        """Take in a read of live rows that began after the last `update`; arguments as in `read_ended`."""
        reached = self._settled if last_id is None else min(self._settled, last_id)
        self._live_watermark = max(self._live_watermark, reached)
        self._leave_to_open_writers(self._live_watermark, last_id, now)

    def read_ended(self, last_id: int | None, now: float) -> None:
        """Take in a normal read that began after the last `update`.

        Args:
            last_id: the highest id that it returned; None where it found nothing.
            now: when it ended.
        """
        settled = self._settled if self._bound is None else min(self._settled, self._bound)
        reached = settled if last_id is None else min(settled, last_id)
        if self._watermark == BEGINNING:  # This read has walked what a sweep would walk.
            self._walked, self._sweep_after = reached, now + SWEEP_SECONDS
        self._watermark = max(self._watermark, reached)
        if self._bound is None:
            self._leave_to_open_writers(self._watermark, last_id, now)

    def _leave_to_open_writers(self, watermark: int, last_id: int | None, now: float) -> None:
        """Pass over the ids that the read which has just ended went through, while their writers are open.

        The read itself has checked which writers were open. So it passed over no row of a writer that had ended.
        """
        self._open_writers = None
        if self._may_be_open is None or now >= self._read_all_after:
            self._read_all_after = now + PASS_OVER_SECONDS
            return
        up_to = self._may_be_open.up_to if last_id is None else min(self._may_be_open.up_to, last_id)
        if up_to > watermark:
            self._open_writers = self._may_be_open._replace(up_to=up_to)

    @property
    def sweeping(self) -> bool:
        """Whether a sweep has begun and not ended."""
        return self._swept is not None

    def slice_due(self, now: float, *, busy: bool) -> IdRange | None:
        """The ids that the sweep reads next; None if none are due. It begins later if many rows arrive (`busy`)."""
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
            usual = min(self._sweep_took, self._last_sweep_took)  # One long sweep alone was delayed by chance.
            self._sweep_after = now + max(SWEEP_SECONDS, SWEEP_REST * usual)
            self._walked, self._swept = self._watermark, None
            self._last_sweep_took, self._sweep_took = self._sweep_took, 0.0

    def reset(self) -> None:
        """Read from the table's beginning again, to find rows below the id watermark."""
        self._open_writers = None
        self._watermark, self._swept, self._walked = BEGINNING, None, BEGINNING
        if self._bound is not None:
            self._live_watermark = self._bound
