"""A row of the outbox as the harvester reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from operator import itemgetter
from typing import Any, NamedTuple, overload

POSTGRES_EPOCH_MICROS = 946_684_800_000_000  # 2000-01-01 UTC, since 1970.


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Replaces the value of a row that is too large for a record. Its value and its headers were not read.

    It is neither text nor bytes, so no client takes it for a value. It is not None, because that is a tombstone.
    """

    size: int  # Bytes.
    limit: int
    what: str = "the value has"

    def __len__(self) -> int:
        return 0  # It takes next to nothing in memory.


@dataclass(frozen=True, slots=True)
class Misfit:
    """Replaces the value of a row whose columns are not as they must be, or cannot be read."""

    reason: str


class WholeRecord(NamedTuple):
    """Replaces the value of a row whose record goharvest's columns cannot hold: see `core.whole_record`.

    The headers of such a row are in the fields of other rows, and some of their values may be bytes.
    """

    key: str | bytes
    value: str | bytes | None
    partition: int | None  # None: the partitioner chooses.
    timestamp: int | None  # Milliseconds since 1970; None: when it is published.


@dataclass(frozen=True, slots=True)
class RecordLimit:
    """The limit of a record's size, by which the database can tell a row that is too large without reading it."""

    value: int  # Bytes, of a record or of a value alone.

    @property
    def headers(self) -> int:
        """The largest size that both arrays of headers may have in the database, in bytes.

        Besides its two texts, a header takes at least 3 bytes in a record, and at most 13 in the database. So arrays of
        more than five times the size of a record do not fit into one.
        """
        return 5 * self.value

    def too_large(self, value: int, headers: int) -> TooLarge | None:
        """What replaces the value of a row whose value and headers have these sizes; None if they are to be read."""
        if value > self.value:
            return TooLarge(value, self.value)
        return TooLarge(headers, self.value, "the headers have") if headers > self.headers else None


class OutboxRow(NamedTuple):
    """One row.

    `create_time` is in microseconds since Postgres' epoch, 2000-01-01 UTC, as Postgres sends it: a `datetime` takes
    four times as long to make, and cannot hold infinity. `horizon` is the same for all rows of a read: the first
    transaction id that the read could not see.
    """

    id: int
    create_time: int
    topic: str
    key: str
    value: str | bytes | TooLarge | WholeRecord | Misfit | None
    header_keys: list[str]
    header_values: list[str]  # Those of a whole record may be bytes, too.
    horizon: int


class Rows(Sequence[OutboxRow]):
    """The rows of a read. An `OutboxRow` is made only when a row is accessed.

    A busy harvester handles hundreds of thousands of rows in a second, and accesses few of them: see `fields_of`.
    """

    __slots__ = ("_topics", "fields")

    def __init__(self, fields: Sequence[tuple[Any, ...]]) -> None:
        """Make the rows of `fields`: for each row, a tuple of the fields of `OutboxRow`, in their order."""
        self.fields = fields
        self._topics: frozenset[Any] | None = None

    @property
    def topics(self) -> frozenset[Any]:
        """The topics of the rows. They are collected on the first call."""
        if self._topics is None:
            self._topics = frozenset(column(self, "topic"))
        return self._topics

    @overload
    def __getitem__(self, index: int) -> OutboxRow: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> OutboxRow | Rows:
        return Rows(self.fields[index]) if isinstance(index, slice) else OutboxRow(*self.fields[index])

    def __iter__(self) -> Iterator[OutboxRow]:
        return starmap(OutboxRow, self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def sorted(self) -> Rows:
        """The same rows, ascending by id."""
        return Rows(sorted(self.fields, key=itemgetter(0)))


def fields_of(rows: Sequence[OutboxRow]) -> Sequence[tuple[Any, ...]]:
    """The fields of each row, as tuples. It makes no objects if `rows` is a `Rows`."""
    return rows.fields if isinstance(rows, Rows) else rows


def column(rows: Sequence[OutboxRow], field: str) -> Iterator[Any]:
    """One field of each row."""
    return map(itemgetter(OutboxRow._fields.index(field)), fields_of(rows))


def topics_of(rows: Sequence[OutboxRow]) -> frozenset[Any]:
    """The topics of `rows`. A `Rows` remembers them."""
    return rows.topics if isinstance(rows, Rows) else frozenset(column(rows, "topic"))


def is_tombstone(row: OutboxRow) -> bool:
    """Whether the record of `row` has no value."""
    return (row.value.value if isinstance(row.value, WholeRecord) else row.value) is None


def length_of(row: OutboxRow) -> int:
    """About the length of a record of `row`, without its topic: characters of texts, and bytes of everything else."""
    arrays = (array for array in (row.header_keys, row.header_values) if isinstance(array, list))
    own = (row.value.key, row.value.value) if isinstance(row.value, WholeRecord) else (row.key, row.value)
    parts = (*own, *(each for array in arrays for each in array))
    return sum(len(part) for part in parts if isinstance(part, str | bytes | list | TooLarge))
