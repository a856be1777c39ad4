"""What became of rows: lost, repeated, out of order, or published though their transaction never committed.

The writer says in each value which transaction it is of, and where in it; so the verdict rests on nothing that a
harvester does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

EXAMPLES = 5


class Transaction(NamedTuple):
    """A transaction that committed, of `rows` rows, places 0 to rows - 1.

    Seconds of the writer's monotonic clock: it `began` no earlier, and was `decided` no later. infinity: nobody knows.
    """

    rows: int
    began: float
    decided: float = math.inf


class Seen(NamedTuple):
    """A record as a `read_committed` consumer sees it."""

    partition: int
    offset: int
    key: str
    value: str


class Place(NamedTuple):
    """A row's place: which transaction, the how-manieth of it."""

    transaction: int
    place: int

    @classmethod
    def of(cls, record: Seen) -> Place | None:
        """The place that a record's value names; None when it is not as it was written."""
        transaction, place, key, *_ = record.value.split(" ", 3)
        return cls(int(transaction), int(place)) if key == record.key else None


def value_of(place: Place, key: str, padding: str) -> str:
    """The value to write for a row."""
    return f"{place.transaction} {place.place} {key} {padding}"


@dataclass(slots=True)
class Verdict:
    """How many rows were committed, how many arrived for the first time, and all that is wrong; with a few examples."""

    committed: int = 0
    arrived: int = 0
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


def judge(committed: Mapping[int, Transaction], seen: Iterable[Seen]) -> Verdict:
    """Judge all that is in a topic. Pure.

    Order is DESIGN.md's promise 3: a row must not come after one of its key whose transaction began when its own had
    been decided, nor after a later one of its own transaction. A repeated row is a duplicate, and judged no further.
    """
    verdict = Verdict(committed=sum(each.rows for each in committed.values()))
    arrived: set[Place] = set()
    keys = _Keys()
    for record in sorted(seen, key=lambda each: each[:2]):
        where = f"key {record.key} at {record.partition}/{record.offset}: {record.value[:40]!r}"
        place = Place.of(record)
        transaction = committed.get(place.transaction) if place else None
        if place is None or transaction is None or place.place >= transaction.rows:
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
    for place in missing(committed, arrived):
        verdict.lost += 1
        verdict._example(f"lost, row {place.place} of transaction {place.transaction}")
    return verdict


def missing(committed: Mapping[int, Transaction], arrived: set[Place]) -> Iterable[Place]:
    """The places that have not arrived."""
    for number, transaction in committed.items():
        for place in range(transaction.rows):
            if (number, place) not in arrived:
                yield Place(number, place)


class _Keys:
    """What has been seen of each key."""

    def __init__(self) -> None:
        self._partition: dict[str, int] = {}
        self._latest_began: dict[str, float] = {}
        self._place: dict[tuple[str, int], int] = {}

    def in_order(self, record: Seen, place: Place, transaction: Transaction) -> bool:
        key, own = record.key, (record.key, place.transaction)
        fine = (
            self._partition.setdefault(key, record.partition) == record.partition
            and self._latest_began.get(key, -math.inf) <= transaction.decided
            and self._place.get(own, -1) < place.place
        )
        self._latest_began[key] = max(self._latest_began.get(key, -math.inf), transaction.began)
        self._place[own] = place.place
        return fine
