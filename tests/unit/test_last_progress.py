"""Which progress record is the last one, whoever else has written to the topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.core.last_progress import LastProgress, LastRecordFinder, LogRecord, Numbering
from outbox_plugin.core.progress import MalformedProgress, OutboxIdentity, ProgressRecord
from outbox_plugin.core.recovery import TermHistory, require_recorded
from outbox_plugin.core.signing import Signer, Slot
from outbox_plugin.errors import ProgressLost

SIGNER = Signer(b"ours" * 8)
SLOT = Slot("progress", "outbox-progress", 0)
FINDER = LastRecordFinder(SIGNER, SLOT, b"0")


def a_record(term: int, sequence: int = 0, after: int = -1) -> ProgressRecord:
    return ProgressRecord(OutboxIdentity("incarnation", "place"), f"leader-{term}", 0, (), 0, term, sequence, after)


@dataclass
class Topic:
    """A partition of the progress topic: leaders write to it, one after the other, and anybody else between them."""

    records: list[LogRecord | None] = field(default_factory=list)  # None: a marker, or a record of another key.
    true: ProgressRecord | None = None  # The last one that is committed.
    term: int = 0
    numbering: Numbering = field(default_factory=Numbering)

    def take_over(self) -> None:
        self.term += 1
        self.numbering = Numbering()
        self.numbering.read_to(len(self.records))

    def publish(self, *, commit: bool, copied: bool) -> None:
        record = self.numbering.numbered(a_record(self.term))
        value = record.encode()
        self.records.append(LogRecord(len(self.records), commit, value, SIGNER.sign(SLOT, b"0", value)))
        if copied:
            self.copy(len(self.records) - 1)
        self.records.append(None)
        if commit:
            self.numbering.committed()
            self.true = record

    def copy(self, place: int) -> None:
        if self.records and (original := self.records[place % len(self.records)]) is not None:
            self.records.append(original._replace(offset=len(self.records), is_committed=True))

    def forge(self) -> None:
        value = a_record(self.term + 1).encode()
        headers = Signer(bytes(32)).sign(SLOT, b"0", value)
        self.records.append(LogRecord(len(self.records), True, value, headers))


def read(topic: Topic, reach: int, finder: LastRecordFinder = FINDER) -> LastProgress:
    while True:
        start = max(0, len(topic.records) - reach)
        records = [each for each in topic.records[start:] if each is not None]
        found = finder.conclude(records, start, 0, len(topic.records))
        if found is not None:
            return found
        reach *= 2


steps = st.lists(
    st.sampled_from(["take over", "commit", "commit", "abort", "commit, copied", "abort, copied", "forge", "marker"])
    | st.integers(0, 200),
    max_size=60,
)


@given(steps, st.integers(1, 10))
def test_the_last_record_is_found_whatever_others_write(steps: Sequence[str | int], reach: int) -> None:
    topic = Topic()
    topic.take_over()
    for step in steps:
        match step:
            case "take over":
                topic.take_over()
            case "forge":
                topic.forge()
            case "marker":
                topic.records.append(None)
            case int():
                topic.copy(step)
            case _:
                topic.publish(commit="commit" in step, copied="copied" in step)
    assert read(topic, reach).record == topic.true


def test_a_quiet_topic_is_read_no_further_than_its_tail() -> None:
    topic = Topic()
    topic.take_over()
    for _ in range(1_000):
        topic.publish(commit=True, copied=False)
    tail = [each for each in topic.records[-4:] if each is not None]
    found = FINDER.conclude(tail, len(topic.records) - 4, 0, len(topic.records))
    assert found == LastProgress(topic.true, topic.true, len(topic.records), 0)


def test_a_copy_of_an_aborted_record_says_nothing() -> None:
    """Its rows were never published: deleting them would lose them."""
    topic = Topic()
    topic.take_over()
    topic.publish(commit=True, copied=False)
    topic.publish(commit=False, copied=True)
    topic.copy(len(topic.records) - 3)
    assert read(topic, 1).record == topic.true


def test_a_copy_from_a_topic_that_was_deleted_says_nothing() -> None:
    value = a_record(1, 5, after=1_000).encode()
    record = LogRecord(3, True, value, SIGNER.sign(SLOT, b"0", value))
    found = FINDER.conclude([record], 0, 0, 4)
    assert found is not None
    assert found.record is None


def test_what_is_not_signed_counts_only_where_the_last_leader_may_not_have_signed() -> None:
    unsigned = a_record(0)
    garbage = LogRecord(1, True, b"garbage", None)
    tail = [LogRecord(0, True, unsigned.encode(), None), garbage, LogRecord(2, False, a_record(0, 1).encode(), None)]
    believing = replace(FINDER, accepts_unsigned=True)
    assert believing.conclude(tail, 0, 0, 3) == LastProgress(unsigned, None, 3, 3)
    assert believing.conclude(tail, 90, 0, 93) == LastProgress(unsigned, None, 93, 3)
    assert FINDER.conclude(tail, 0, 0, 3) == LastProgress(None, None, 3, 3)
    assert FINDER.conclude(tail, 90, 0, 93) is None
    value = a_record(7, 1).encode()
    signed = LogRecord(3, True, value, SIGNER.sign(SLOT, b"0", value))
    found = believing.conclude([*tail, signed, garbage._replace(offset=4)], 0, 0, 5)
    assert found is not None
    assert found.record == a_record(7, 1)


@given(st.binary(), st.lists(st.tuples(st.text(), st.binary() | st.none())))
def test_nothing_that_others_write_stops_a_read(value: bytes, headers: list[tuple[str, str | bytes | None]]) -> None:
    record = LogRecord(0, True, value, headers)
    for accepts_unsigned in (False, True):
        found = replace(FINDER, accepts_unsigned=accepts_unsigned).conclude([record], 0, 0, 1)
        assert found is not None
        assert found.ignored == 1


def test_a_record_of_a_later_version_is_no_forgery() -> None:
    value = b'{"version": 99}'
    with pytest.raises(MalformedProgress, match="version '99'"):
        FINDER.conclude([LogRecord(0, True, value, SIGNER.sign(SLOT, b"0", value))], 0, 0, 1)


@pytest.mark.parametrize(("record", "is_lost"), [(None, True), (a_record(6), True), (a_record(7), False)])
def test_a_record_that_the_database_expects_must_be_there(record: ProgressRecord | None, is_lost: bool) -> None:
    terms = TermHistory(9, {"0": 7})
    require_recorded(record, "1-of-2", terms)
    require_recorded(record, "0", terms, adopt=True)
    if is_lost:
        with pytest.raises(ProgressLost, match="of the shard 0, of term 7") as lost:
            require_recorded(record, "0", terms)
        assert "\n" not in str(lost.value)
    else:
        require_recorded(record, "0", terms)
