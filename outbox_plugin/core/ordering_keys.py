"""Ordering keys: the unit whose rows keep their order, and which waits as a whole behind a bad row.

An ordering key is one key of one topic. Where the topic itself is wrong, it is the whole topic. The rows of a topic
that have no key, which an ALTER TABLE may have let in, are one ordering key too: all of them are bad, and no other
row waits for them.

A *parked* key waits at its bad row: that row and all later rows of the key stay in the outbox, in their order, until
somebody releases the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import Refusal


class OrderingKey(NamedTuple):
    """A key of a topic. Where `key` is None, the whole topic; with `keyless`, the topic's rows without a key."""

    topic: str
    key: str | None
    keyless: bool = False

    @classmethod
    def of(cls, row: OutboxRow) -> OrderingKey:
        """The ordering key that the row has by its topic and key."""
        return cls(row.topic, row.key, row.key is None)

    @property
    def whole_topic(self) -> bool:
        """Whether it stands for all rows of the topic."""
        return self.key is None and not self.keyless

    @property
    def description(self) -> str:
        """Which of the topic's rows it stands for, for a message."""
        return "rows without a key" if self.keyless else "every key" if self.key is None else f"key {self.key}"


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """An ordering key that waits behind the bad row `row_id`."""

    topic: str
    key: str | None
    row_id: int
    reason: str
    since: datetime
    keyless: bool = False

    @property
    def ordering_key(self) -> OrderingKey:
        """Which ordering key waits."""
        return OrderingKey(self.topic, self.key, self.keyless)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that Kafka refuses for what it is, and why."""

    row: OutboxRow
    refusal: Refusal

    @property
    def ordering_key(self) -> OrderingKey:
        """The ordering key that must wait for the row."""
        return OrderingKey(self.row.topic, None) if self.refusal.whole_topic else OrderingKey.of(self.row)

    def because(self, more: str) -> BadRow:
        """The same row, with `more` added to its reason."""
        return BadRow(self.row, Refusal(f"{self.refusal.reason}; {more}", self.refusal.whole_topic))


class OrderingKeys:
    """A set of ordering keys that is quick to ask about many rows."""

    def __init__(self, keys: Iterable[OrderingKey] = ()) -> None:
        self._all = frozenset(keys)
        self._topics = {key.topic for key in self._all if key.whole_topic}
        self._keys = {(key.topic, key.key) for key in self._all if not key.whole_topic}

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, row: OutboxRow) -> bool:
        return row.topic in self._topics or (row.topic, row.key) in self._keys

    def without_rows_of_these(self, rows: Sequence[OutboxRow]) -> Sequence[OutboxRow]:
        """The `rows` that have none of these keys."""
        return [row for row in rows if row not in self] if self._all else rows


def first_bad_rows(rows: Sequence[OutboxRow], refusals: Mapping[int, Refusal]) -> list[BadRow]:
    """The earliest refused row of each ordering key, in the order of `rows`.

    Later rows of the key wait for it, whether they were refused themselves or not.

    Args:
        rows: what was to be sent, ascending by id.
        refusals: why rows were refused, by their ids.
    """
    found: dict[OrderingKey, BadRow] = {}
    for row in rows:
        if row.id in refusals:
            bad = BadRow(row, refusals[row.id])
            found.setdefault(bad.ordering_key, bad)
    return [
        bad
        for bad in found.values()
        if bad.ordering_key.whole_topic or OrderingKey(bad.ordering_key.topic, None) not in found
    ]


def without(bad: Iterable[BadRow], others: Iterable[BadRow]) -> list[BadRow]:
    """The `bad` rows that are not among `others`, by their ids."""
    ids = {other.row.id for other in others}
    return [row for row in bad if row.row.id not in ids]


def before_bad_rows(rows: Sequence[OutboxRow], bad: Iterable[BadRow]) -> list[OutboxRow]:
    """The `rows`, which ascend by id, without each bad row and the later rows of its ordering key."""
    first = {row.ordering_key: row.row.id for row in bad}
    return [
        row
        for row in rows
        if row.id < first.get(OrderingKey.of(row), row.id + 1)
        and row.id < first.get(OrderingKey(row.topic, None), row.id + 1)
    ]
