"""The progress record: which rows have been published and are perhaps not yet deleted, and whose rows they are.

It is written in the same Kafka transaction as the window, so it is committed exactly when the window is. Ids alone are
not identity: a record may outlive the rows that it names (a table truncated with its sequence restarted, dropped, or
restored from a backup). So it says which incarnation of which outbox it speaks of, and when each row was created.

A row's transaction id is no identity either: a migration that rewrites the table, or an UPDATE, gives the row another
one, and after 2^31 transactions an old one looks young. Within a term it proves a row quickly; creation times decide
about rows that it does not prove, and about all rows of an earlier term.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from itertools import pairwise
from typing import Any

from outbox_plugin.core import creation_times
from outbox_plugin.core.id_ranges import LARGEST_ID, IdRanges
from outbox_plugin.core.row import POSTGRES_EPOCH_MICROS, OutboxRow, Rows, column, fields_of
from outbox_plugin.core.transactional_id_generations import LARGEST_GENERATION
from outbox_plugin.errors import OutboxError

VERSION = 1
VERSION_WITH_GENERATION = 2  # Harvesters that know no generations refuse it: they could not fence its leader.
_POSTGRES_EPOCH = datetime.fromtimestamp(POSTGRES_EPOCH_MICROS // 1_000_000, UTC)
_TEXT_CHARACTERS = 10_000
LATEST_TIME = 2**53  # Within 285 years of the epoch, Postgres' arithmetic is exact to the microsecond.
LARGEST_BODY = 900_000  # Bytes; a broker takes records of up to 1 MB by default.
_FIELDS_BYTES = 250  # An upper bound for the names, numbers and marks of a publication, or of the record itself.
LARGEST_PUBLICATION = 1_000_000  # Rows; far more than a window has.
WIDE_GAP = 100_000  # Ids between two rows. A purge walks all rows between its first and its last id.
_CUTS = 8  # Cuts of one read, at most: each is one more purge, and the ids may all be far apart.


@dataclass(frozen=True, slots=True)
class OutboxIdentity:
    """The identity of an outbox.

    `place` is its database cluster, database and table. A table that was truncated, or dropped and migrated again, has
    the same `place` and another `incarnation`.
    """

    incarnation: str
    place: str


@dataclass(frozen=True, slots=True)
class Publication:
    """Rows that one transaction published: their ids, and what proves that a row is one of them.

    A row is one of them if its id is in `ids` and it was created at the time that `times` gives for the id.

    A second test is faster. It is also one of them if the transaction that inserted it is below `horizon`, and it was
    created no earlier than `created_from` and no later than `created_until` (microseconds since Postgres' epoch; None
    where that is beyond `LATEST_TIME`). This holds only as long as transaction ids do not wrap or go back.

    `created` holds the creation times, see `creation_times`. It is None if all rows have the same, or if they are not
    known, as in records of earlier versions.
    """

    ids: IdRanges
    horizon: int
    created_until: int | None
    created_from: int | None = None
    created: str | None = None

    @classmethod
    def of(cls, rows: Sequence[OutboxRow]) -> Publication:
        """The publication of one read's `rows`, which ascend by id."""
        if not rows:
            return cls(IdRanges(), 0, None)
        times = list(column(rows, "create_time"))
        if None in times:  # A bad row, which is not published, may have no time.
            times = [LATEST_TIME + 1 if each is None else each for each in times]
        ids = IdRanges.of(list(column(rows, "id")))
        earliest, latest = _exact(min(times)), _exact(max(times))
        same = earliest is not None and earliest == latest
        created = None if same else creation_times.encoded(times, earliest, latest)
        return cls(ids, rows[0].horizon, latest, earliest, created)

    @property
    def most_bytes(self) -> int:
        """An upper bound of its bytes in a progress record. It is fast, because nothing is encoded."""
        ranges = self.ids.ranges
        digits = max(len(str(ranges[0][0])), len(str(ranges[-1][1]))) if ranges else 0
        return len(ranges) * (2 * digits + 4) + len(self.created or "") + _FIELDS_BYTES

    @property
    def times(self) -> list[int] | None:
        """When each row of `ids` was created, in microseconds since Postgres' epoch; None where that is not known.

        Raises:
            ValueError: `created` is not readable.
        """
        if self.created is not None:
            whole = self.created_from is None or self.created_until is None
            return creation_times.decoded(self.created, len(self.ids), None if whole else self.created_from)
        if self.created_from is not None and self.created_from == self.created_until:
            return [self.created_from] * len(self.ids)
        return None


def publications_of(rows: Sequence[OutboxRow]) -> tuple[Publication, ...]:
    """The publications of a transaction's `rows`, which ascend by id: at least one for each read that they are of.

    The horizon and the times of another read would prove less. A read is also cut at its widest gaps.
    """
    return tuple(Publication.of(part) for read in _reads_of(rows) for part in _cut_at_wide_gaps(read))


def _reads_of(rows: Sequence[OutboxRow]) -> Iterable[Sequence[OutboxRow]]:
    """The rows of each read. Reads with the same horizon saw the same rows, and count as one."""
    horizons = list(column(rows, "horizon"))
    if len(set(horizons)) < 2:
        return [rows] if rows else []
    reads: dict[int, list[tuple[Any, ...]]] = {}
    for horizon, fields in zip(horizons, fields_of(rows), strict=True):
        reads.setdefault(horizon, []).append(fields)
    return map(Rows, reads.values())


def _cut_at_wide_gaps(rows: Sequence[OutboxRow]) -> Iterator[Sequence[OutboxRow]]:
    ids = list(column(rows, "id"))
    cuts: list[int] = []
    if ids[-1] - ids[0] > WIDE_GAP:
        wide = [(above - id_, place) for place, (id_, above) in enumerate(pairwise(ids), 1) if above - id_ > WIDE_GAP]
        cuts = sorted(place for _, place in nlargest(_CUTS, wide))
    return (rows[start:end] for start, end in pairwise([0, *cuts, len(ids)]))


def _readable(publication: Publication) -> Publication:
    """Check a publication, and return it.

    Raises:
        TypeError, ValueError: its times are not readable, or it names more rows than any window has.
    """
    if len(publication.ids) > LARGEST_PUBLICATION:
        raise ValueError(f"{len(publication.ids)} rows in one publication")
    if publication.created is not None:
        publication.times  # noqa: B018 - decodes them.
    return publication


def _microseconds(time: object) -> int | None:
    """A time of a progress record in microseconds since Postgres' epoch; the first ones were written in ISO 8601."""
    if time is None:
        return None
    if isinstance(time, str):
        time = (datetime.fromisoformat(time) - _POSTGRES_EPOCH) // timedelta(microseconds=1)
    return _whole(time, -LATEST_TIME, LATEST_TIME)


def _whole(number: object, smallest: int, largest: int) -> int:
    if type(number) is not int or not smallest <= number <= largest:
        raise ValueError(f"expected a whole number from {smallest} to {largest} (given: {str(number)[:80]!r})")
    return number


def _text(text: object) -> str:
    if not isinstance(text, str) or len(text) > _TEXT_CHARACTERS:
        raise ValueError(f"expected a text of at most {_TEXT_CHARACTERS} characters (given: {str(text)[:80]!r})")
    text.encode()  # Raises UnicodeEncodeError, a ValueError, for half a surrogate pair.
    return text


def _exact(time: int) -> int | None:
    return time if abs(time) <= LATEST_TIME else None


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """What a leader writes, inside a transaction, about the rows of its shard.

    `records` counts the events of the record's own transaction, to recognize a torn transaction. `generation` is that
    of the transactional id (see `core.transactional_id_generations`): a database that was restored from a backup may
    have forgotten it. `term`, `sequence` and `after` tell the record from a copy of it: see `last_progress`. Records
    of versions that did not sign lack these three, and count as if they had the defaults.
    """

    identity: OutboxIdentity
    leader_id: str
    records: int
    publications: tuple[Publication, ...]
    generation: int = 0
    term: int = 0
    sequence: int = 0
    after: int = -1

    @property
    def number(self) -> tuple[int, int]:
        """Ascends from record to record of a slice."""
        return self.term, self.sequence

    @property
    def most_bytes(self) -> int:
        """An upper bound of the bytes that `encode` returns. It is fast, because nothing is encoded."""
        texts = self.identity.incarnation, self.identity.place, self.leader_id
        return _FIELDS_BYTES + 6 * sum(map(len, texts)) + sum(each.most_bytes for each in self.publications)

    def encode(self) -> bytes:
        """The record as JSON, without creation times if brokers would refuse it for its size."""
        body = self._encode(with_times=True)
        return body if len(body) <= LARGEST_BODY else self._encode(with_times=False)

    def _encode(self, *, with_times: bool) -> bytes:
        body = {
            "version": VERSION_WITH_GENERATION if self.generation else VERSION,
            "incarnation": self.identity.incarnation,
            "place": self.identity.place,
            "leader_id": self.leader_id,
            "term": self.term,
            "sequence": self.sequence,
            "after": self.after,
            "records": self.records,
            **({"generation": self.generation} if self.generation else {}),
            "publications": [
                {
                    "ids": each.ids.text(),
                    "horizon": each.horizon,
                    "created_until": each.created_until,
                    "created_from": each.created_from,
                    **({"created": each.created} if each.created is not None and with_times else {}),
                }
                for each in self.publications
            ],
        }
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, body: bytes) -> ProgressRecord:
        """The record that `body` encodes.

        Raises:
            MalformedProgress: it is not a record of ours. To guess what was published would lose or repeat rows.
        """
        try:
            fields: dict[str, Any] = json.loads(body)
            if fields["version"] not in (VERSION, VERSION_WITH_GENERATION):
                version = str(fields["version"])[:80]
                known = f"{VERSION} or {VERSION_WITH_GENERATION}"
                raise MalformedProgress(f"the progress record has version {version!r}, expected {known}")
            return cls(
                OutboxIdentity(_text(fields["incarnation"]), _text(fields["place"])),
                _text(fields["leader_id"]),
                _whole(fields["records"], 0, LARGEST_ID),
                tuple(
                    _readable(
                        Publication(
                            IdRanges.parse(each["ids"]),
                            _whole(each["horizon"], 0, LARGEST_ID),
                            _microseconds(each["created_until"]),
                            _microseconds(each.get("created_from")),
                            each.get("created"),
                        )
                    )
                    for each in fields["publications"]
                ),
                _whole(fields.get("generation", 0), 0, LARGEST_GENERATION),
                _whole(fields.get("term", 0), 0, LARGEST_ID),
                _whole(fields.get("sequence", 0), 0, LARGEST_ID),
                _whole(fields.get("after", -1), -1, LARGEST_ID),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise MalformedProgress(f"the progress record is not readable: {error!r}") from None


class MalformedProgress(OutboxError):
    """The progress topic holds something that is not a progress record of a version that we know."""
