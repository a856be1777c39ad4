"""Bad rows, which Kafka refuses for what they are, and the keys that are parked behind them.

The later rows of a bad row's ordering key wait, so that the key keeps its order. A *parked* key waits at its bad row:
that row and all later rows of the key stay in the outbox, in their order, until somebody releases the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from outbox_plugin.core.ordering_key import OrderingKey
from outbox_plugin.core.row import OutboxRow
from outbox_plugin.errors import Refusal


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
