"""When to read new rows before a backlog: the rows that a large batch, or a pause, has left behind.

Rows are read in the order of their ids. So a new row would wait until every row before it has been relayed, although
order counts only among the rows of one key. DBLog (Netflix, arXiv 2010.12597) reads a backfill in chunks between live
events for the same reason. Here it goes like this:

1. The rows fall far behind, and ids are drawn even after that: `due` names a *bound*, an id at or below which no
   further row can appear.
2. The keys of all rows up to the bound are summarised, on a thread of its own. Large batches have left summaries of
   their keys; the keys of other rows are read. The reads of rows pause meanwhile, because they would take processor
   time from the summary, and all live rows wait for it. A summary that takes long goes on beside the reads.
3. The reads are *split*. Rows above the bound are live: they go first, except rows whose key may be in the summary.
   Those rows wait for the backlog, and so each key keeps its order. The rows up to the bound go on in their own order.
4. The backlog has been read: rows are read in the order of their ids again, first of all those that waited.

Where live rows fall far behind as well, another bound is found, and all rows up to it become the backlog.
"""

from __future__ import annotations

from typing import NamedTuple

from outbox_plugin.core.id_watermark import BEGINNING, IdWatermark

MIN_BACKLOG_IDS = 100_000  # A leader relays about so many rows in half a second.
SEARCH_SECONDS = 1.0  # For so long, the database is asked often, to find a bound soon. Then at every refresh.
PAUSE_SECONDS = 0.06  # No rows are read for so long: a read of many rows would delay the search.
SUMMARY_PAUSE_SECONDS = 1e-6  # For each id of a backlog. To relay its row takes at least four times as long.
MAX_SUMMARY_PAUSE_SECONDS = 10.0  # Because there may be far fewer rows than ids.
SUMMARY_REST = 10.0  # A summary slows the relay down. The next one waits for this many times its length.
SUMMARY_REST_SECONDS = 5.0  # The next summary waits for this long at least.


class SummaryRequest(NamedTuple):
    """Summarise the keys of all rows with ids up to a bound; there are about `ids` of them, or fewer.

    The bound may be any id from `least_bound` on up to `bound`.
    """

    bound: int
    least_bound: int
    ids: int


class Backlog:
    """Decides for one term. `now` is in monotonic seconds."""

    def __init__(self) -> None:
        """Nothing has been read."""
        self._last_drawn = 0
        self._reached: int | None = None  # The last id of the last read, if it found many rows.
        self._furthest = BEGINNING  # The highest id that was ever read while the reads were not split.
        self._behind_since: float | None = None
        self._drawn_before: int | None = None  # The last id that was drawn when the rows had just fallen behind.
        self._began: float | None = None  # When the summary that is being made was asked for.
        self._pauses_until = 0.0  # No rows are read for so long while the summary is being made.
        self._is_outdated = False  # Whether the sequence was set back after that.
        self._not_before = 0.0

    def read_ended(self, last_id: int | None, now: float, *, many: bool, is_split: bool) -> None:
        """Take in a read of the newest rows: of the live ones where the reads are split, else of all.

        Args:
            last_id: the highest id that it returned; None where it found nothing.
            now: when it ended.
            many: whether there may be many more rows behind it.
            is_split: whether the reads are split.
        """
        self._reached = last_id if many else None
        ids = 0 if self._reached is None else self._last_drawn - self._reached
        if ids < MIN_BACKLOG_IDS // 2:
            self._behind_since = self._drawn_before = None
        elif ids >= MIN_BACKLOG_IDS and self._behind_since is None:
            self._behind_since = now
        if last_id is not None and not is_split:
            self._furthest = max(self._furthest, last_id)

    def is_searching(self, now: float) -> bool:
        """Whether the rows have just fallen behind, and a bound is to be found soon."""
        since = self._behind_since
        if since is None or self._began is not None or now < self._not_before:
            return False
        return max(since, self._not_before) > now - SEARCH_SECONDS

    @property
    def is_summarising(self) -> bool:
        """Whether keys are being summarised."""
        return self._began is not None

    def pauses_reads(self, now: float) -> bool:
        """Whether no rows are to be read for now: a bound is looked for, or keys are summarised, and that ends soon."""
        if self._began is not None:
            return now < self._pauses_until
        return self.is_searching(now) and self._behind_since is not None and now < self._behind_since + PAUSE_SECONDS

    def due(self, now: float, ids: IdWatermark) -> SummaryRequest | None:
        """Which keys are to be summarised now, after an update of `ids`; None where nothing is to be done."""
        self._last_drawn = ids.last_drawn
        if self._reached is None or self._behind_since is None:
            return None
        if self._drawn_before is None:
            self._drawn_before = ids.last_drawn
        if ids.last_drawn <= self._drawn_before or self._began is not None or now < self._not_before:
            return None
        least_bound, above = self._furthest if ids.bound is None else ids.bound, ids.to_read.above
        if ids.settled - self._reached < MIN_BACKLOG_IDS or ids.settled < least_bound:
            return None
        if above == BEGINNING:  # All rows are to be read again. Until the next read, their number is not known.
            return None
        request = SummaryRequest(ids.settled, least_bound, ids.settled - above)
        self._began, self._is_outdated = now, False
        self._pauses_until = now + min(MAX_SUMMARY_PAUSE_SECONDS, SUMMARY_PAUSE_SECONDS * request.ids)
        return request

    def sequence_was_set_back(self) -> None:
        """Take in that the ids begin again: a summary that is being made is of no use."""
        self._is_outdated = True

    def summary_ended(self, now: float) -> None:
        """Take in that the summary has been made, or could not be made."""
        if self._began is not None:
            self._not_before = now + max(SUMMARY_REST_SECONDS, SUMMARY_REST * (now - self._began))
            self._began = None

    def may_split(self, bound: int, *, is_split: bool) -> bool:
        """Whether live rows may go first from now on.

        Rows above the bound that were read in the order of their ids may still be on their way to Kafka. No live row
        may pass them. Where the reads are split already, live rows keep their order among themselves.
        """
        return not self._is_outdated and (is_split or self._furthest <= bound)
