"""Key queues and retries: what may be handled now, and up to where each partition is done."""

from __future__ import annotations

import pickle
import random
from datetime import UTC, datetime
from sys import getsizeof

import pytest

from outbox_plugin.core.event_identity import event_identity
from outbox_plugin.core.memory_limit import HEADER_BYTES, RECORD_BYTES
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.batch_limit import DEADLOCK_CAUTION_SECONDS, MAX_BATCH_RECORDS, TARGET_SECONDS, BatchLimit
from outbox_plugin.inbox.key_queues import KeyQueues, Outcome
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import MAX_LOSSES, MAX_SHORTAGES, Failures, Fault, Retry, fault_of

PARTITION = TopicPartition("t", 0)


def record(offset: int, key: str | None = "k", partition: int = 0, letter: int | None = None) -> Received:
    body = None if key is None else key.encode()
    return Received("t", partition, offset, 0, body, b"", (), f"{partition}/{offset}", letter)


def holding(*records: Received) -> KeyQueues:
    queues = KeyQueues()
    queues.assign([PARTITION])
    for each in records:
        queues.add(each)
    return queues


def test_a_key_is_handled_one_at_a_time_and_keys_side_by_side() -> None:
    queues = holding(record(1, "a"), record(2, "b"), record(3, "a"))
    first, second = queues.take(1, 0.0), queues.take(1, 0.0)
    assert [each.records[0].offset for each in first + second] == [1, 2]
    assert queues.take(9, 0.0) == []  # 3 waits for 1.
    queues.finish(first[0], Outcome(1), 0.0)
    assert [each.records[0].offset for each in queues.take(9, 0.0)] == [3]


def test_a_partition_is_done_up_to_its_first_record_that_is_not() -> None:
    queues = holding(record(5, "a"), record(6, "b"), record(9, "c"))
    one, two, three = (queues.take(1, 0.0)[0] for _ in range(3))
    queues.finish(two, Outcome(1), 0.0)
    assert queues.committable() == {}
    queues.finish(one, Outcome(1), 0.0)
    assert queues.committable() == {PARTITION: 7}
    assert queues.committable() == {}
    queues.finish(three, Outcome(1), 0.0)
    assert queues.committable() == {PARTITION: 10}


def test_what_is_done_behind_a_record_that_takes_long_takes_no_memory() -> None:
    """A handler may take an hour, while millions of records of other keys go by."""
    queues, end = holding(record(0, "slow")), 3_000
    slow = queues.take(1, 0.0)
    before = len(pickle.dumps(queues))
    for offset in range(1, end):
        queues.add(record(offset, "fast"))
        queues.finish(queues.take(1, 0.0)[0], Outcome(1), 0.0)
    assert len(pickle.dumps(queues)) < before + 100
    assert queues.committable() == {}
    queues.finish(slow[0], Outcome(1), 0.0)
    assert queues.committable() == {PARTITION: end}


def test_a_record_that_comes_again_while_it_is_not_done_moves_no_offset() -> None:
    """As where the partition was cut, and is read anew from before it."""
    queues = holding(record(95, "a"), record(96, "b"))
    failed, done = queues.take(2, 0.0)
    queues.finish(failed, Outcome(0, again_in=60.0, fault=Fault.RECORD), 0.0)
    queues.finish(done, Outcome(1), 0.0)
    queues.add(record(95, "a"))
    queues.add(record(97, "c"))
    [last] = queues.take(2, 0.0)
    queues.finish(last, Outcome(1), 0.0)
    assert queues.committable().get(PARTITION, 95) == 95


def test_asking_for_one_partition_leaves_the_others_to_be_told() -> None:
    queues = holding(record(5, "a"), record(6, "b"))
    for taken in queues.take(9, 0.0):
        queues.finish(taken, Outcome(1), 0.0)
    assert queues.committable([TopicPartition("t", 99)]) == {}
    assert queues.committable() == {PARTITION: 7}


def test_a_record_that_is_tried_again_holds_up_its_own_queue_alone() -> None:
    queues = holding(record(1, "a"), record(2, "a"), record(3, "b"))
    [taken] = queues.take(2, 0.0)
    queues.finish(taken, Outcome(0, again_in=5.0, fault=Fault.RECORD), 10.0)
    assert [each.records[0].offset for each in queues.take(9, 14.9)] == [3]
    assert queues.next_due() == 15.0
    [again] = queues.take(9, 15.0)
    assert ([each.offset for each in again.records], again.failures) == ([1, 2], Failures(own=1))


@pytest.mark.parametrize("limit", [1, 7])
def test_partitions_take_turns_whatever_each_holds(limit: int) -> None:
    """A record of a fast topic does not wait for what is held of forty slow partitions."""
    queues = KeyQueues()
    queues.assign([TopicPartition("t", number) for number in range(41)])
    for offset in range(100):
        for number in range(40):
            queues.add(record(offset, f"k{offset}", number))
    queues.take(50, 0.0)
    queues.add(record(0, "fast", 40))
    taken: list[Received] = []
    while all(each.partition != 40 for each in taken):
        taken += [each for batch in queues.take(limit, 0.0) for each in batch.records]
        assert len(taken) <= 40 + limit
    queues.close([TopicPartition("t", number) for number in range(0, 40, 2)])
    rest = [each.partition for batch in queues.take(10_000, 0.0) for each in batch.records]
    assert rest[:20] == sorted({*rest}, key=rest.index)  # Of those that are left, each has its turn, too.
    assert {each % 2 for each in rest} == {1}


def test_failures_are_counted_from_the_first_record_that_is_not_done() -> None:
    queues = holding(record(1), record(2), record(3))
    [taken] = queues.take(9, 0.0)
    queues.finish(taken, Outcome(0, again_in=1.0, fault=Fault.RECORD), 0.0)
    [taken] = queues.take(9, 1.0)
    queues.finish(taken, Outcome(1, again_in=1.0, fault=Fault.RECORD), 1.0)
    [taken] = queues.take(9, 2.0)
    assert (taken.records[0].offset, taken.failures) == (2, Failures(own=1))
    queues.finish(taken, Outcome(0, again_in=1.0), 2.0)
    assert queues.take(9, 3.0)[0].failures == Failures(own=1)  # Not counted.


def test_what_is_revoked_is_dropped_and_a_late_outcome_has_no_say() -> None:
    queues = holding(record(1, "a"), record(2, "b"))
    [taken] = queues.take(1, 0.0)
    queues.close([PARTITION])
    assert queues.running([PARTITION])
    assert queues.take(9, 0.0) == []
    queues.revoke([PARTITION])
    queues.assign([PARTITION])
    queues.add(record(7, "a"))
    queues.finish(taken, Outcome(1), 0.0)
    assert queues.committable() == {}
    assert [each.records[0].offset for each in queues.take(9, 0.0)] == [7]
    assert queues.held == 1


def test_a_position_is_known_from_the_start_and_belongs_to_the_topic_of_its_assignment() -> None:
    queues = KeyQueues()
    other = TopicPartition("unnamed", 0)
    queues.assign([PARTITION, other], {"t": "one"}, {PARTITION: 5, other: 3})
    assert queues.positions() == {PARTITION: ("one", 5)}
    assert queues.committable() == {PARTITION: 5, other: 3}
    queues.add(record(7))
    assert queues.positions() == {PARTITION: ("one", 5)}
    [taken] = queues.take(9, 0.0)
    queues.finish(taken, Outcome(1), 0.0)
    assert queues.positions() == {PARTITION: ("one", 8)}
    queues.restart(PARTITION, "two")  # It was recreated.
    assert queues.positions() == {}


def test_a_record_that_comes_after_a_restart_waits_for_those_of_its_key_that_came_before() -> None:
    queues = holding(record(5, "a"), record(6, "b"), record(7, "b"))
    [running] = queues.take(1, 0.0)
    queues.restart(PARTITION, "t")
    for offset, key in ((5, "a"), (6, "b")):
        queues.add(record(offset, key))
    [waiting] = queues.take(9, 0.0)
    assert [each.offset for each in waiting.records] == [6, 7, 6]
    queues.finish(running, Outcome(0, again_in=0.0), 0.0)
    assert [[each.offset for each in taken.records] for taken in queues.take(9, 0.0)] == [[5, 5]]


def test_a_position_from_before_a_restart_is_not_known_and_then_counts_what_waits() -> None:
    queues = holding(record(5, "a"))
    queues.restart(PARTITION, "t")
    assert (queues.positions(), queues.committable()) == ({}, {})
    queues.leave_out(record(1, "b"))
    assert queues.next_offsets() == {PARTITION: 1}
    [taken] = queues.take(9, 0.0)
    queues.finish(taken, Outcome(1), 0.0)
    assert queues.committable() == {PARTITION: 2}


def test_a_key_waits_for_its_handlers_from_before_its_partition_was_given_up() -> None:
    queues = holding(record(5, "a"))
    earlier = queues.take(1, 0.0)
    for other in ("b", "c"):
        queues.revoke([PARTITION])
        queues.assign([PARTITION])
        queues.add(record(5, "a"))
        queues.add(record(6, other))
        assert [each.records[0].offset for each in queues.take(9, 0.0)] == [6]
    queues.finish(earlier[0], Outcome(1), 0.0)
    assert [each.records[0].offset for each in queues.take(9, 0.0)] == [5]


def test_a_record_of_a_partition_that_is_not_ours_is_left_alone() -> None:
    queues = holding(record(1, partition=4))
    assert (queues.take(9, 0.0), queues.held) == ([], 0)


def test_a_dead_letter_takes_its_turn_in_its_queue_once_and_moves_no_offset() -> None:
    queues = holding(record(1, "a"), record(0, "a", letter=3), record(0, "a", letter=3))
    [taken] = queues.take(9, 0.0)
    assert [each.dead_letter for each in taken.records] == [None, 3]
    queues.finish(taken, Outcome(2), 0.0)
    assert queues.committable() == {PARTITION: 2}
    queues.add(record(0, "a", letter=3))
    assert queues.held == 1


def test_records_without_a_key_need_no_order() -> None:
    queues = holding(record(1, None), record(2, None))
    assert len(queues.take(1, 0.0) + queues.take(1, 0.0)) == 2


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_order_is_kept_and_no_offset_is_passed_over(seed: int) -> None:
    """Random takes, failures and ends; each key in order, each record done once, offsets never ahead of a record."""
    chance = random.Random(seed)
    count = 300
    queues = holding(*(record(offset, f"k{chance.randrange(7)}") for offset in range(count)))
    done: dict[bytes | None, list[int]] = {}
    running, now = [], 0.0
    finished: set[int] = set()
    while len(finished) < count:
        now += 0.5
        running += queues.take(chance.randint(1, 9), now)
        keys = [each.records[0].key for each in running]
        assert len(keys) == len(set(keys))
        if running:
            taken = running.pop(chance.randrange(len(running)))
            good = chance.randint(0, len(taken.records))
            for each in taken.records[:good]:
                done.setdefault(each.key, []).append(each.offset)
                finished.add(each.offset)
            queues.finish(
                taken, Outcome(good, None if good == len(taken.records) else chance.random() * 3, Fault.RECORD), now
            )
            first_open = next((each for each in range(count) if each not in finished), count)
            assert all(reached == first_open for reached in queues.committable().values())
    assert sum(map(len, done.values())) == count
    assert all(offsets == sorted(offsets) for offsets in done.values())
    assert queues.held == 0


def test_fast_handlers_share_a_transaction_and_slow_ones_do_not() -> None:
    batch_limit = BatchLimit()
    assert batch_limit.limit(1_000, 4) == 1
    for _ in range(20):
        batch_limit.finish(batch_limit.limit(100_000, 1), 0.001, rolled_back=False)
    assert batch_limit.limit(100_000, 1) == MAX_BATCH_RECORDS
    assert batch_limit.limit(100, 4) == 25  # Shared among those who are idle.
    batch_limit.finish(MAX_BATCH_RECORDS, 10 * TARGET_SECONDS, rolled_back=False)
    assert batch_limit.limit(100_000, 1) == MAX_BATCH_RECORDS // 10
    batch_limit.finish(50, 0.1, rolled_back=True)
    assert batch_limit.limit(100_000, 1) == 1


def test_after_a_deadlock_one_batch_runs_at_a_time_for_a_while() -> None:
    batch_limit = BatchLimit()
    for records in (1, 2, 4):
        batch_limit.start(records)
        batch_limit.finish(records, 0.001, rolled_back=False)
    assert batch_limit.limit(100, 1, now=0.0) == 8
    batch_limit.start(8)
    assert batch_limit.limit(100, 1, now=0.0) == 8
    batch_limit.start(8)
    batch_limit.finish(8, 1.0, rolled_back=True, deadlock=True, now=1.0)
    batch_limit.start(1)
    batch_limit.finish(1, 0.001, rolled_back=False)
    assert batch_limit.limit(100, 1, now=2.0) == 1  # The other batch still runs.
    batch_limit.finish(8, 0.001, rolled_back=False)
    assert batch_limit.limit(100, 1, now=2.0) > 1
    batch_limit.start(2)
    assert batch_limit.limit(100, 1, now=1.0 + DEADLOCK_CAUTION_SECONDS) > 1


@pytest.mark.parametrize("end", ["done", "again", "revoked", "revoked, then done"])
def test_bytes_are_counted_while_records_are_held(end: str) -> None:
    large = Received("t", 0, 1, 0, b"key", b"value", (("name", b"text"), ("none", None)), "1")
    assert large.size == RECORD_BYTES + 3 + 5 + 2 * HEADER_BYTES + 8 + 4
    small = record(2, "a")
    queues = holding(large, small)
    assert queues.held_bytes == large.size + small.size
    [taken] = queues.take(1, 0.0)
    assert queues.held_bytes == large.size + small.size
    if end.startswith("revoked"):
        queues.revoke([PARTITION])
        assert queues.held_bytes == large.size  # It is still being handled.
        queues.finish(taken, Outcome(int(end != "revoked"), again_in=1.0), 0.0)
        assert queues.held_bytes == 0
    else:
        queues.finish(taken, Outcome(int(end == "done")), 0.0)
        assert queues.held_bytes == small.size + (0 if end == "done" else large.size)


def test_the_size_of_a_record_covers_the_objects_of_its_headers() -> None:
    headers = tuple((f"name {number}", b"value %d" % number) for number in range(10_000))
    objects = sum(getsizeof(each) + getsizeof(each[0]) + getsizeof(each[1]) for each in headers) + getsizeof(headers)
    assert objects <= Received("t", 0, 1, 0, None, None, headers, "1").size <= 1.1 * objects


def test_losses_of_the_connection_are_counted_in_a_row() -> None:
    queues = holding(record(1), record(2))
    for times in range(3):
        [taken] = queues.take(9, 9.0)
        assert taken.failures == Failures(losses=times)
        queues.finish(taken, Outcome(0, again_in=0.0, fault=Fault.LOST), 0.0)
    [taken] = queues.take(9, 9.0)
    queues.finish(taken, Outcome(1, again_in=0.0, fault=Fault.LOST), 0.0)  # The first is done, the second lost it.
    assert queues.take(9, 9.0)[0].failures == Failures(losses=1)


def test_waits_double_up_to_a_limit() -> None:
    retry = Retry(attempts=3, first_seconds=1.0, most_seconds=5.0)
    assert [retry.wait(failures, 0.0) for failures in (1, 2, 3, 4, 500)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert retry.wait(2, 0.5) == 1.5
    assert [retry.is_spent(Failures(own=failures)) for failures in (2, 3)] == [False, True]


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"first_seconds": 0.0}, {"first_seconds": 9.0, "most_seconds": 1.0}]
)
def test_a_retry_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected attempts >= 1"):
        Retry(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sqlstate", "fault"),
    [
        (None, Fault.RECORD),
        ("23505", Fault.RECORD),
        ("08006", Fault.RECORD),
        ("40001", Fault.NOBODY),
        ("53200", Fault.SHORTAGE),
        ("57014", Fault.RECORD),
        ("57P01", Fault.SHORTAGE),
        ("58030", Fault.SHORTAGE),
    ],
)
def test_the_error_code_says_whose_fault_a_failure_is(sqlstate: str | None, fault: Fault) -> None:
    assert fault_of(sqlstate) is fault


def test_failures_of_each_kind_are_counted_apart() -> None:
    """A server that is short of memory and then restarts has not lost the connection seven times."""
    failures, retry = Failures(), Retry()
    for fault in [Fault.SHORTAGE] * (MAX_SHORTAGES - 1) + [Fault.LOST] * (MAX_LOSSES - 1) + [Fault.NOBODY] * 100:
        failures = failures.plus(fault)
    assert not retry.is_spent(failures)
    assert retry.is_spent(failures.plus(Fault.SHORTAGE))
    assert retry.is_spent(failures.plus(Fault.LOST))


def test_an_event_is_known_by_its_header_or_else_by_its_place() -> None:
    assert event_identity((("idempotency-key", b"7"),), "t/1/2").key == "7"
    assert event_identity((("idempotency-key", None), ("other", b"7")), "t/1/2").key == "t/1/2"
    job = (("outbox-job", b"nightly"), ("outbox-sequence", b"007"))
    assert event_identity((*job, ("idempotency-key", b"7")), "t/1/2").key == "7"
    assert event_identity(job, "t/1/2").key == "job nightly 7"
    assert event_identity(job[:1], "t/1/2").key == "t/1/2"
    assert event_identity((("outbox-job", b""), job[1]), "t/1/2").key == "t/1/2"


@pytest.mark.parametrize(
    ("said", "at"),
    [
        (b"2026-01-01T12:00:00+00:00", datetime(2026, 1, 1, 12, tzinfo=UTC)),
        (b"2026-01-01T12:00:00", datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),  # Without a time zone it says nothing.
        (b"noon", datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
        (None, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)),
    ],
)
def test_an_event_occurred_when_its_header_says_or_else_when_it_was_recorded(said: bytes | None, at: datetime) -> None:
    assert Received("t", 0, 0, 1_000, None, None, (("occurred-at", said),), "").occurred_at == at
