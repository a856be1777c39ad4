"""Lanes: what a bad row makes wait, so that it harms itself only.

A lane is one key of one topic, or a whole topic where the topic itself is what is wrong. The rows of a topic that have
no key, which an ALTER TABLE may have let in, are a lane too: all of them are bad, and no other row waits for them.

A lane is *parked* at its bad row: that row and all later rows of the lane stay in the outbox, in their order, until the
lane is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import Refusal


class Lane(NamedTuple):
    """A key of a topic; where `key` is None, the whole topic, or, if `keyless`, its rows without a key."""

    topic: str
    key: str | None
    keyless: bool = False

    @classmethod
    def of(cls, row: OutboxRow) -> Lane:
        """The lane that the row is in by its key."""
        return cls(row.topic, row.key, row.key is None)

    @property
    def whole_topic(self) -> bool:
        """Whether all rows of the topic are in it."""
        return self.key is None and not self.keyless

    @property
    def whose(self) -> str:
        """Which of the topic's rows are in it."""
        return "rows without a key" if self.keyless else "every key" if self.key is None else f"key {self.key}"


@dataclass(frozen=True, slots=True)
class ParkedLane:
    """A lane that waits behind the bad row `row_id`; see `Lane`."""

    topic: str
    key: str | None
    row_id: int
    reason: str
    since: datetime
    keyless: bool = False

    @property
    def lane(self) -> Lane:
        """Which lane."""
        return Lane(self.topic, self.key, self.keyless)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that Kafka refuses for what it is, and why."""

    row: OutboxRow
    refusal: Refusal

    @property
    def lane(self) -> Lane:
        """What has to wait for it."""
        return Lane(self.row.topic, None) if self.refusal.whole_topic else Lane.of(self.row)

    def because(self, more: str) -> BadRow:
        """The same row, with `more` behind its reason."""
        return BadRow(self.row, Refusal(f"{self.refusal.reason}; {more}", self.refusal.whole_topic))


class Lanes:
    """A set of lanes that is asked about many rows."""

    def __init__(self, lanes: Iterable[Lane] = ()) -> None:
        self._lanes = frozenset(lanes)
        self._topics = {lane.topic for lane in self._lanes if lane.whole_topic}
        self._keys = {(lane.topic, lane.key) for lane in self._lanes if not lane.whole_topic}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __contains__(self, row: OutboxRow) -> bool:
        return row.topic in self._topics or (row.topic, row.key) in self._keys

    def let_through(self, rows: Sequence[OutboxRow]) -> Sequence[OutboxRow]:
        """The `rows` that are in none of the lanes."""
        return [row for row in rows if row not in self] if self._lanes else rows


def first_bad_rows(rows: Sequence[OutboxRow], refusals: Mapping[int, Refusal]) -> list[BadRow]:
    """The earliest refused row of each lane, in the order of `rows`; `refusals` by the row's id.

    The rows behind it in its lane wait for it, whether they were refused themselves or not.
    """
    found: dict[Lane, BadRow] = {}
    for row in rows:
        if row.id in refusals:
            bad = BadRow(row, refusals[row.id])
            found.setdefault(bad.lane, bad)
    return [bad for bad in found.values() if bad.lane.whole_topic or Lane(bad.lane.topic, None) not in found]


def without(bad: Iterable[BadRow], others: Iterable[BadRow]) -> list[BadRow]:
    """The `bad` rows that are not among `others`, by their ids."""
    ids = {each.row.id for each in others}
    return [each for each in bad if each.row.id not in ids]


def before_bad_rows(rows: Sequence[OutboxRow], bad: Iterable[BadRow]) -> list[OutboxRow]:
    """The `rows`, which ascend by id, without each bad row and all that is behind it in its lane."""
    first = {each.lane: each.row.id for each in bad}
    return [
        row
        for row in rows
        if row.id < first.get(Lane.of(row), row.id + 1) and row.id < first.get(Lane(row.topic, None), row.id + 1)
    ]
