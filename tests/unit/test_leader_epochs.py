"""An inbox notices that a partition was cut before its position by the epoch of the last record that it handled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox_plugin.core.leader_epochs import Finding, GroupPosition, LeaderEpochs, compare
from outbox_plugin.core.topic_partition import TopicPartition

PARTITION = TopicPartition("t", 0)


@pytest.mark.parametrize(
    ("offset", "leader_epoch", "finding"),
    [
        (9, 3, Finding.HANDLED),
        (9, 4, Finding.TRUNCATED),
        (9, None, Finding.HANDLED),  # Kafka does not return the epoch.
        (10, 3, Finding.NEW),  # The record before the position was compacted away.
        (12, 4, Finding.GONE),  # It was cut, or a transaction marker stands there, or retention has deleted it.
        (12, 2, Finding.TRUNCATED),  # Epochs never decrease within a log.
        (0, 1, Finding.TRUNCATED),  # The partition ended before the position, so librdkafka went to its beginning.
    ],
)
def test_the_first_record_shows_whether_the_partition_was_cut(
    offset: int, leader_epoch: int | None, finding: Finding
) -> None:
    assert compare(GroupPosition(10, 3), offset, leader_epoch) is finding


@pytest.mark.parametrize(
    ("offset", "leader_epoch", "finding"),
    [
        (4, 1, Finding.HANDLED),
        (9, 3, Finding.HANDLED),
        (4, 4, Finding.NEW),  # The leader that was elected after the cut wrote it.
        (10, 3, Finding.NEW),  # The group has not been there.
        (4, None, Finding.NEW),
    ],
)
def test_an_old_record_of_a_partition_that_was_cut_was_handled_if_its_epoch_is_not_above_the_positions(
    offset: int, leader_epoch: int | None, finding: Finding
) -> None:
    epochs = LeaderEpochs()
    epochs.restart(PARTITION, GroupPosition(10, 3))
    assert epochs.add(PARTITION, offset, leader_epoch, key_may_be_forgotten=True) is finding


def test_a_record_whose_key_is_remembered_is_left_to_its_key() -> None:
    """Where the new leader has records of its own, of an epoch that is not above the position's."""
    epochs = LeaderEpochs()
    epochs.start(PARTITION, GroupPosition(10, 3))
    assert epochs.add(PARTITION, 9, 4) is Finding.TRUNCATED
    epochs.restart(PARTITION, epochs.position(PARTITION, 10))
    assert epochs.add(PARTITION, 0, 1, key_may_be_forgotten=True) is Finding.HANDLED
    assert epochs.add(PARTITION, 1, 1) is Finding.NEW
    epochs.start(PARTITION, None)
    assert epochs.add(PARTITION, 0, 1, key_may_be_forgotten=True) is Finding.NEW


@pytest.mark.parametrize(("beginning", "cut"), [(0, True), (9, True), (10, False), (12, False)])
def test_a_partition_whose_last_handled_record_is_gone_was_cut_unless_it_begins_after_it(
    beginning: int, cut: bool
) -> None:
    epochs = LeaderEpochs()
    epochs.start(PARTITION, GroupPosition(10, 3))
    assert epochs.add(PARTITION, 12, 4) is Finding.GONE
    assert epochs.is_truncated(PARTITION, beginning) is cut


@pytest.mark.parametrize("position", [None, GroupPosition(0, 3), GroupPosition(10)])
def test_a_position_without_a_record_or_an_epoch_before_it_is_not_compared(position: GroupPosition | None) -> None:
    epochs = LeaderEpochs()
    assert epochs.start(PARTITION, position) == (None if position is None else position.next_offset)
    assert epochs.add(PARTITION, 9, 1) is Finding.NEW


def test_only_the_first_record_is_compared() -> None:
    epochs = LeaderEpochs()
    assert epochs.start(PARTITION, GroupPosition(10, 3)) == 9
    assert epochs.before(PARTITION, 10) == 3
    assert [epochs.add(PARTITION, offset, 3) for offset in (9, 10, 9)] == [Finding.HANDLED, Finding.NEW, Finding.NEW]


@settings(max_examples=200)
@given(st.data())
def test_no_record_of_a_log_that_was_cut_is_passed_over(data: st.DataObject) -> None:
    """Each position that was ever committed, compared with any later state of the log."""
    log: list[tuple[str, int]] = []
    epochs, epoch, number = LeaderEpochs(), 0, 0
    epochs.start(PARTITION, None)
    read: set[str] = set()
    fetch = 0
    committed = GroupPosition(0)
    for step in data.draw(st.lists(st.sampled_from(["append", "append", "read", "read", "cut", "start"]), max_size=50)):
        if step == "append":
            log.append((str(number), epoch))
            number += 1
        elif step == "cut":
            del log[data.draw(st.integers(0, len(log))) :]
            epoch += 1
            fetch = min(fetch, len(log))  # librdkafka notices a cut under it.
        elif step == "start":
            first = epochs.start(PARTITION, committed)
            assert first is not None
            fetch = first if first <= len(log) else 0
        elif fetch < len(log):
            name, at = log[fetch]
            finding = epochs.add(PARTITION, fetch, at, key_may_be_forgotten=data.draw(st.booleans()))
            if finding is Finding.TRUNCATED:
                epochs.restart(PARTITION, committed)
                fetch = 0
                continue
            if finding is Finding.HANDLED:
                assert name in read
            read.add(name)
            fetch += 1
            committed = GroupPosition(fetch, epochs.before(PARTITION, fetch))
            assert {name for name, _ in log[:fetch]} <= read


@pytest.mark.parametrize(("position", "first"), [(None, 0), (GroupPosition(5), 5)])
def test_where_no_record_was_read_before_those_that_are_fetched_again_it_goes_back_to_the_start(
    position: GroupPosition | None, first: int
) -> None:
    """They stand behind a gap. After a cut, other records may stand there, and no epoch would show it."""
    epochs = LeaderEpochs()
    epochs.start(PARTITION, position)
    assert epochs.fetch_again(PARTITION, 7) == first
