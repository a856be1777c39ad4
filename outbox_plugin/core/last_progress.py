"""Which record of the progress topic is a slice's last one, whoever else writes to the topic.

A leader writes its records in transactions, signed, and numbered by (term, sequence). The database counts terms. The
sequence counts every record of the term, committed or not. So originals ascend from offset to offset: a record that
does not is a copy which somebody else has written, and is passed over.

A copy may stand where its original does not count, or cannot be seen: the original was in a transaction that was
aborted, or it lies before the part of the topic that was read. So records are read as they stand, aborted ones
included: a copy then follows its original. And each record says an offset behind which its original stands, `after`:
where the topic has been read from there on, the first record with its number is the original.

    read from `start` to the end, and in it         conclusion
    a committed original                            the last of them is the slice's last record
    none, and `start` is the topic's beginning      the last committed record that is first with its number, if any
    none                                            not known: read further back

Records that are not signed, or not by this outbox, are counted and passed over. Only where the slice's last leader may
have been of a version that did not sign, the last one of those counts, until a signed one stands in the topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from outbox_plugin.core.progress import MalformedProgress, ProgressRecord
from outbox_plugin.core.signing import Headers, Signer, Slot

OFFSETS_PER_TRANSACTION = 2  # In the progress topic, at least: a record, and the marker of its commit.


class LogRecord(NamedTuple):
    """A record of the progress topic that has the slice's key, whoever wrote it."""

    offset: int
    is_committed: bool
    value: bytes | None
    headers: Headers | None


@dataclass(frozen=True, slots=True)
class LastProgress:
    """The result of a read of the progress topic, for one slice.

    `record` is its last committed record. `newest` is its last record, committed or not. `end` is the offset that
    was the partition's next when the read began. `ignored` counts the records that no harvester of this outbox has
    signed, as far as the topic was read.
    """

    record: ProgressRecord | None
    newest: ProgressRecord | None = None
    end: int = 0
    ignored: int = 0


@dataclass(frozen=True, slots=True)
class LastRecordFinder:
    """Finds the last record of one slice.

    `accepts_unsigned`: whether its last leader may have been of a version that did not sign.
    """

    signer: Signer
    slot: Slot
    key: bytes
    accepts_unsigned: bool = False

    def conclude(self, records: Sequence[LogRecord], start: int, first: int, end: int) -> LastProgress | None:
        """The last record, if the slice's records from offset `start` to `end` prove it; None if more must be read.

        Args:
            records: all of them, in their order.
            start: where the read began.
            first: where the partition begins.
            end: the partition's next offset when the read began.

        Raises:
            MalformedProgress: a harvester of this outbox has signed what we cannot read: one of a later version.
        """
        signed = [each for each in records if self._verifies(each)]
        ignored = len(records) - len(signed)
        newest = last = None
        is_proven = False
        for each in signed:
            record = ProgressRecord.parse(each.value or b"")
            if record.after >= each.offset:
                continue  # A copy from a topic of this name that was deleted.
            if newest is not None and record.number <= newest.number:
                continue
            newest = record
            if each.is_committed:
                last, is_proven = record, is_proven or record.after >= start - 1
        if is_proven or start <= first:
            unsigned = self._last_unsigned(records) if not signed else None
            return LastProgress(last or unsigned, newest, end, ignored)
        if not signed and (unsigned := self._last_unsigned(records)):
            return LastProgress(unsigned, None, end, ignored)
        return None

    def _verifies(self, record: LogRecord) -> bool:
        return self.signer.verifies(self.slot, self.key, record.value, record.headers)

    def _last_unsigned(self, records: Sequence[LogRecord]) -> ProgressRecord | None:
        for each in reversed(records) if self.accepts_unsigned else ():
            try:
                if each.is_committed:
                    return ProgressRecord.parse(each.value or b"")
            except MalformedProgress:
                continue
        return None


class Numbering:
    """Numbers the records that one term writes for one slice."""

    def __init__(self, offsets_per_transaction: int = OFFSETS_PER_TRANSACTION) -> None:
        self._offsets_per_transaction = offsets_per_transaction
        self._sequence = 0
        self._after = -1

    def read_to(self, end: int) -> None:
        """Take in that the partition has been read: later records stand at `end` or behind it."""
        self._after = end - 1

    def numbered(self, record: ProgressRecord) -> ProgressRecord:
        """The record with the next number. No other record gets this number."""
        self._sequence += 1
        return replace(record, sequence=self._sequence, after=self._after)

    def committed(self) -> None:
        """Take in that the transaction of the record that was numbered last is committed."""
        self._after += self._offsets_per_transaction
