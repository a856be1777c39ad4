"""Judges what became of rows: lost, repeated, out of order, or in a place where they do not belong.

The writer puts the number of the transaction, and the row's number in it, into each value. So the verdict does not
depend on anything that a harvester does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

EXAMPLES = 5


class Transaction(NamedTuple):
    """A committed transaction, with the rows 0 to `rows` - 1.

    It began at `began` or later, and was decided at `decided` or earlier, in seconds of the writer's monotonic clock;
    infinity if that is unknown. `aside` has the rows that must not end in the topic, because Kafka refuses them.
    """

    rows: int
    began: float
    decided: float = math.inf
    aside: frozenset[int] = frozenset()


class ReadRecord(NamedTuple):
    """A record as a `read_committed` consumer sees it."""

    partition: int
    offset: int
    key: str
    value: str


class RowId(NamedTuple):
    """Identifies a row: the number of its transaction, and its number in that."""

    transaction: int
    place: int

    @classmethod
    def of(cls, key: str, value: str) -> RowId | None:
        """The place that a row's value names; None if the value is not as it was written."""
        transaction, place, written_key, *_ = value.split(" ", 3)
        return cls(int(transaction), int(place)) if written_key == key else None


def value_of(place: RowId, key: str, padding: str) -> str:
    """The value to write for a row.

    Args:
        place: which row of which transaction it is.
        key: of the row.
        padding: gives the value its length.
    """
    return f"{place.transaction} {place.place} {key} {padding}"


@dataclass(slots=True)
class Verdict:
    """Counts of rows that were committed, that arrived, and of everything that is wrong, with a few examples.

    `aside` counts the rows that ended outside the topic, as they should.
    """

    committed: int = 0
    arrived: int = 0
    aside: int = 0
    lost: int = 0
    duplicates: int = 0
    order_violations: int = 0
    phantoms: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether every row arrived, once, in order, and nothing else did."""
        return not (self.lost or self.duplicates or self.order_violations or self.phantoms)

    def _example(self, what: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(what)


def judge(
    committed: Mapping[int, Transaction], seen: Iterable[ReadRecord], found_aside: Iterable[RowId | None] = ()
) -> Verdict:
    """Judge all rows of a topic, and those elsewhere. Pure.

    The order is the third promise: a row must not come after a row of its key whose transaction began when its own had
    been decided, nor after a later row of its own transaction. A repeated row counts only as a duplicate.

    Args:
        committed: the transactions, by their numbers.
        seen: the records of the topic.
        found_aside: the rows among the dead letters and in other topics, each as often as it is there; None for one
            that nobody wrote so.
    """
    verdict = Verdict(committed=sum(each.rows for each in committed.values()))
    belong_aside = {RowId(number, place) for number, each in committed.items() for place in each.aside}
    arrived: set[RowId] = set()
    keys = _Keys()
    for record in sorted(seen, key=lambda each: each[:2]):
        where = f"key {record.key} at {record.partition}/{record.offset}: {record.value[:40]!r}"
        place = RowId.of(record.key, record.value)
        transaction = committed.get(place.transaction) if place else None
        if place is None or transaction is None or place.place >= transaction.rows or place in belong_aside:
            verdict.phantoms += 1
            verdict._example(f"phantom, {where}")
        elif place in arrived:
            verdict.duplicates += 1
            verdict._example(f"duplicate, {where}")
        else:
            arrived.add(place)
            if not keys.in_order(record, place, transaction):
                verdict.order_violations += 1
                verdict._example(f"out of order, {where}")
    verdict.arrived = len(arrived)
    aside = _judge_aside(verdict, belong_aside, found_aside)
    for place in missing(committed, arrived | aside):
        verdict.lost += 1
        verdict._example(f"lost, row {place.place} of transaction {place.transaction}")
    return verdict


def _judge_aside(verdict: Verdict, belong: set[RowId], found: Iterable[RowId | None]) -> set[RowId]:
    """Enter what is wrong aside; returns the rows that are there as they should be."""
    aside: set[RowId] = set()
    for place in found:
        if place is None or place not in belong:
            verdict.phantoms += 1
            verdict._example(f"put aside though it is not bad, {place}")
        elif place in aside:
            verdict.duplicates += 1
            verdict._example(f"put aside twice, {place}")
        else:
            aside.add(place)
    verdict.aside = len(aside)
    return aside


def missing(committed: Mapping[int, Transaction], arrived: set[RowId]) -> Iterable[RowId]:
    """The places that have not arrived."""
    for number, transaction in committed.items():
        for place in range(transaction.rows):
            if (number, place) not in arrived:
                yield RowId(number, place)


class _Keys:
    """What has been seen of each key."""

    def __init__(self) -> None:
        self._partition: dict[str, int] = {}
        self._latest_began: dict[str, float] = {}
        self._place: dict[tuple[str, int], int] = {}

    def in_order(self, record: ReadRecord, place: RowId, transaction: Transaction) -> bool:
        key, own = record.key, (record.key, place.transaction)
        fine = (
            self._partition.setdefault(key, record.partition) == record.partition
            and self._latest_began.get(key, -math.inf) <= transaction.decided
            and self._place.get(own, -1) < place.place
        )
        self._latest_began[key] = max(self._latest_began.get(key, -math.inf), transaction.began)
        self._place[own] = place.place
        return fine
