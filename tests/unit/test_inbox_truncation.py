"""An unclean election of a leader cuts a partition: offsets come again, with other records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING
from confluent_kafka import TopicPartition as KafkaTopicPartition
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.adapters.topic_ids import Answer
from outbox_plugin.core.leader_epochs import GroupPosition, HandledPosition
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import rereader
from outbox_plugin.inbox.key_queues import KeyQueues, Outcome
from outbox_plugin.inbox.positions import PartitionPositions
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Fault
from tests.inbox_support import poll_loop

PARTITION, ID = TopicPartition("t", 0), "A" * 22
DONE, RETRY_LATER = Outcome(1), Outcome(0, again_in=60.0, fault=Fault.RECORD)


def record(offset: int, key: str) -> Received:
    return Received("t", 0, offset, 0, key.encode(), b"", (), f"{key}/{offset}")


def finish_next(queues: KeyQueues, outcome: Outcome = DONE) -> None:
    [taken] = queues.take(1, 0.0)
    queues.finish(taken, outcome, 0.0)


def test_a_record_written_after_the_cut_is_not_passed_by_the_position() -> None:
    """90 to 96 are done and 97 is retried; the partition is cut to 96, and gets another 96 and 97."""
    queues = KeyQueues()
    queues.assign([PARTITION], {"t": ID})
    for offset in range(90, 98):
        queues.add(record(offset, f"old {offset}"))
        finish_next(queues, RETRY_LATER if offset == 97 else DONE)
    assert queues.committable() == {PARTITION: 97}
    queues.add(record(96, "new 96"))
    queues.add(record(97, "new 97"))
    assert queues.committable() == {PARTITION: 96}
    assert queues.positions() == {PARTITION: (ID, 96)}


def test_a_record_that_is_done_does_not_stand_for_another_one_at_its_offset() -> None:
    queues = KeyQueues()
    queues.assign([PARTITION], {"t": ID}, {PARTITION: 97})
    queues.add(record(97, "old"))
    [old] = queues.take(1, 0.0)
    queues.add(record(97, "new"))
    queues.finish(old, Outcome(1), 0.0)
    assert queues.positions() == {PARTITION: (ID, 97)}
    finish_next(queues)
    assert queues.positions() == {PARTITION: (ID, 98)}


def started_without_a_position(kafka: Kafka) -> Any:
    """The loop of an inbox whose group has handled nothing."""
    loop = loop_of(kafka, Positions())
    loop._epochs.start(PARTITION, None)
    loop._dispatcher._queues.assign([PARTITION], {"t": ID})
    return loop


def test_a_group_that_has_handled_nothing_has_no_position() -> None:
    """It would have no epoch: where the partition begins at 97, and is cut before that, nobody would notice."""
    kafka = Kafka()
    loop = started_without_a_position(kafka)
    loop.add([message(97, b"old 97")])
    loop.commit_and_note()
    assert (loop.reached.all(), kafka.committed) == ({}, [])
    finish_next(loop._dispatcher._queues)
    loop.commit_and_note()
    assert (loop.reached.all(), kafka.committed) == ({PARTITION: (ID, GroupPosition(98, 3))}, [(98, 3)])


def test_nor_has_one_that_reads_the_first_record_again_and_has_not_handled_it() -> None:
    kafka = Kafka()
    loop = started_without_a_position(kafka)
    for offset in (97, 98):
        loop.add([message(offset, b"old %d" % offset)])
        finish_next(loop._dispatcher._queues)
    loop.commit_and_note()
    loop.add([message(97, b"new 97")])  # The partition was cut, and begins at 97 for the inbox.
    loop.commit_and_note()
    assert (loop.reached.all(), kafka.committed) == ({}, [(99, 3)])


def test_a_partition_in_which_all_was_handled_before_is_done_up_to_its_end() -> None:
    """As after a cut; its lag is nothing."""
    queues = KeyQueues()
    queues.assign([PARTITION], {"t": ID})
    for offset in (90, 91):
        queues.leave_out(record(offset, "old"))
    assert (queues.held, queues.committable(), queues.next_offsets()) == (0, {PARTITION: 92}, {PARTITION: 92})


def test_a_record_from_before_the_cut_that_waits_is_not_passed_either() -> None:
    """90 is retried, and still stands in the partition after it was cut to 96."""
    queues = KeyQueues()
    queues.assign([PARTITION], {"t": ID}, {PARTITION: 90})
    for offset in range(90, 98):
        queues.add(record(offset, f"old {offset}"))
        finish_next(queues, RETRY_LATER if offset == 90 else DONE)
    queues.add(record(96, "new 96"))
    finish_next(queues)
    assert queues.positions() == {PARTITION: (ID, 90)}


@given(st.data())
def test_whatever_is_cut_no_position_lies_above_a_record_of_the_log_that_is_not_done(data: st.DataObject) -> None:
    """Random records, gaps, cuts, failures and ends; after all is done, the position is the end of the log."""
    queues, now = KeyQueues(), 0.0
    queues.assign([PARTITION], {"t": ID}, {PARTITION: 0})
    end, number = 0, 0
    log: dict[int, Received] = {}  # What stands in the partition and was added.
    done: list[Received] = []
    running = []
    for step in data.draw(st.lists(st.sampled_from(["add", "add", "cut", "take", "done", "fail"]), max_size=40)):
        now += 1.0
        if step == "cut" and end:
            end = data.draw(st.integers(0, end - 1))
            log = {offset: kept for offset, kept in log.items() if offset < end}
        if step in ("add", "cut"):  # Nobody knows of a cut before a record comes.
            end += data.draw(st.integers(0, 2)) if step == "add" else 0
            log[end] = Received("t", 0, end, 0, b"%d" % data.draw(st.integers(0, 3)), b"", (), str(number))
            queues.add(log[end])
            end, number = end + 1, number + 1
        elif step == "take":
            running += queues.take(data.draw(st.integers(1, 4)), now)
        elif running:
            taken = running.pop(data.draw(st.integers(0, len(running) - 1)))
            count = len(taken.records) if step == "done" else data.draw(st.integers(0, len(taken.records) - 1))
            done += taken.records[:count]
            queues.finish(taken, Outcome(count, None if step == "done" else 3.0), now)
        handled = {kept.idempotency_key for kept in done}
        waiting = [offset for offset, kept in log.items() if kept.idempotency_key not in handled]
        assert queues.positions()[PARTITION].next_offset <= min(waiting, default=end)
    for taken in running:
        queues.finish(taken, Outcome(len(taken.records)), now)
    while queues.held:
        for taken in queues.take(9, now + 99.0):
            queues.finish(taken, Outcome(len(taken.records)), now)
    assert queues.positions()[PARTITION].next_offset == end


class Kafka:
    """Notes the offsets that are committed, and from where it is to fetch."""

    def __init__(self) -> None:
        self.committed: list[tuple[int, int | None]] = []
        self.sought: list[int] = []

    def get_watermark_offsets(self, partition: KafkaTopicPartition, *, cached: bool) -> tuple[int, int]:
        return 97, 100

    def seek(self, partition: KafkaTopicPartition) -> None:
        self.sought.append(partition.offset)

    def commit(self, offsets: Sequence[KafkaTopicPartition], asynchronous: bool) -> None:
        self.committed += [(each.offset, each.leader_epoch) for each in offsets]


def message(offset: int, value: bytes) -> Any:
    answers = {
        "error": None,
        "topic": "t",
        "partition": 0,
        "offset": offset,
        "leader_epoch": 3 if value.startswith(b"old") else 4,
        "timestamp": (1, 0),
        "key": value,
        "value": value,
        "headers": [("idempotency-key", value)],
    }
    return SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})


class Positions:
    """Notes what is written, and fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.written: list[GroupPosition] = []

    def write_now(self, reached: Callable[[], PartitionPositions]) -> bool:
        self.failures -= 1
        if self.failures < 0:
            self.written += [each.position for each in reached().values()]
        return self.failures < 0


def loop_of(kafka: Kafka, positions: Positions) -> Any:
    same = Answer(recreated=set(), known={"t"})
    ids = SimpleNamespace(of=lambda topic: ID, known=lambda: {"t": ID}, look_up=lambda topics: same)
    return poll_loop(kafka, positions, ids)


def test_an_inbox_commits_the_offset_of_the_first_record_after_the_cut() -> None:
    kafka = Kafka()
    loop = loop_of(kafka, Positions())
    loop._dispatcher._queues.assign([PARTITION], {"t": ID}, {PARTITION: 90})
    for offset in range(90, 98):
        loop.add([message(offset, b"old %d" % offset)])
        finish_next(loop._dispatcher._queues, RETRY_LATER if offset == 97 else DONE)
    loop.commit_and_note()
    loop.add([message(96, b"new 96"), message(97, b"new 97")])
    loop.commit_and_note()
    assert kafka.committed == [(97, 3), (96, 3)]
    finish_next(loop._dispatcher._queues)
    finish_next(loop._dispatcher._queues)
    assert loop._dispatcher._queues.positions() == {
        PARTITION: (ID, 96)
    }  # The old 97 still waits; the new ones may come again.


def test_a_partition_is_read_again_only_after_the_position_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inbox that was killed in between would not know which old records it had handled."""
    monkeypatch.setattr(rereader, "UNKNOWN_ID_SECONDS", 0.0)
    positions, kafka = Positions(failures=1), Kafka()
    loop = loop_of(kafka, positions)
    loop._dispatcher._queues.assign([PARTITION], {"t": ID}, {PARTITION: 97})
    loop._epochs.start(PARTITION, GroupPosition(97, 3))
    for _ in range(2):
        assert (positions.written, loop._dispatcher._queues.partitions()) == ([], [PARTITION])
        loop.add([message(96, b"new 96")])
    assert kafka.sought == [96, OFFSET_BEGINNING]
    assert positions.written == [GroupPosition(97, 3)]
    assert loop._epochs.position(PARTITION, 0) == GroupPosition(0, None, (HandledPosition(97, 3),))


def test_so_is_one_that_is_cut_under_the_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereader, "UNKNOWN_ID_SECONDS", 0.0)
    positions, kafka = Positions(failures=1), Kafka()
    loop = loop_of(kafka, positions)
    loop._dispatcher._queues.assign([PARTITION], {"t": ID}, {PARTITION: 96})
    loop.add([message(96, b"old 96")])
    finish_next(loop._dispatcher._queues)
    for _ in range(2):
        assert loop._dispatcher._queues.positions() == {PARTITION: (ID, 97)}
        loop.add([message(90, b"old 90"), message(91, b"old 91")])
    assert kafka.sought == [90]
    assert positions.written == [GroupPosition(97, 3)]
    assert loop._dispatcher._queues.positions() == {PARTITION: (ID, 92)}
    assert loop._epochs.position(PARTITION, 92) == GroupPosition(92, 3, (HandledPosition(97, 3),))


def started_at_98(kafka: Kafka, positions: Positions) -> Any:
    loop = loop_of(kafka, positions)
    loop._epochs.start(PARTITION, GroupPosition(98))
    loop._dispatcher._queues.assign([PARTITION], {"t": ID}, {PARTITION: 98})
    return loop


@pytest.mark.parametrize("offset", [99, 103], ids=["at the next offset", "behind a gap"])
def test_a_record_of_a_new_leader_is_let_through_when_the_record_before_it_is_the_same(offset: int) -> None:
    """librdkafka may have gone back to a cut, and dropped records from before it that nobody had polled."""
    kafka = Kafka()
    loop = started_at_98(kafka, Positions())
    loop.add([message(98, b"old 98"), message(offset, b"new")])
    assert (kafka.sought, loop._dispatcher._queues.held) == ([98], 1)
    loop.add([message(98, b"old 98"), message(offset, b"new"), message(offset + 1, b"new, too")])
    assert (kafka.sought, loop._dispatcher._queues.held) == ([98], 3)


def test_records_are_handled_that_were_dropped_before_they_were_polled() -> None:
    kafka = Kafka()
    loop = started_at_98(kafka, Positions())
    loop.add([message(98, b"old 98"), message(103, b"new")])
    loop.add([message(98 + each, b"old %d" % each) for each in range(5)])
    assert (kafka.sought, loop._dispatcher._queues.held) == ([98], 5)


def test_a_cut_is_noticed_by_the_record_before_that_of_a_new_leader() -> None:
    """librdkafka goes on behind the cut after a pause."""
    kafka, positions = Kafka(), Positions()
    loop = started_at_98(kafka, positions)
    loop.add([message(98, b"old 98"), message(99, b"new 99")])
    loop.add([message(98, b"new 98"), message(99, b"new 99")])
    assert kafka.sought == [98, OFFSET_BEGINNING]
    assert positions.written == [GroupPosition(0)]


def test_the_first_record_is_fetched_again_where_the_partition_begins_before_it() -> None:
    kafka = Kafka()
    loop = started_without_a_position(kafka)
    loop.add([message(99, b"new 99")])
    assert (kafka.sought, loop._dispatcher._queues.held) == ([0], 0)
    loop.add([message(97, b"old 97"), message(98, b"old 98")])
    assert (kafka.sought, loop._dispatcher._queues.held) == ([0], 2)
