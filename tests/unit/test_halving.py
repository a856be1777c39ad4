"""A batch that fails is halved until the guilty event is alone; order and counts stay right."""

from __future__ import annotations

import random

import pytest

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.halving import Halves
from outbox_plugin.inbox.key_queues import KeyQueues, Outcome
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Fault


@pytest.mark.parametrize("seed", range(30))
def test_all_but_the_guilty_and_what_is_behind_it_is_handled_in_its_keys_order(seed: int) -> None:
    chance = random.Random(seed)
    queues = KeyQueues()
    queues.assign([TopicPartition("t", 0)])
    for offset in range(200):
        queues.add(Received("t", 0, offset, 0, b"%d" % chance.randrange(20), b"", (), str(offset)))
    batches = queues.take(200, 0.0)
    guilty = {chance.randrange(200) for _ in range(seed % 5)}
    halves = Halves(batches, lambda each: False)
    handled: list[Received] = []
    tries = 0
    while part := halves.next():
        tries += 1
        bad = any(record.offset in guilty for _, record in part)
        if len(part) > 1 and bad:
            halves.failed(deadlock=False)
        elif len(part) > 1:
            halves.done()
            handled += [record for _, record in part]
        else:
            halves.single(Outcome(0, again_in=1.0, fault=Fault.RECORD) if bad else Outcome(1))
            handled += [] if bad else [part[0][1]]
    for taken, outcome in zip(batches, halves.outcomes(), strict=True):
        offsets = [each.offset for each in taken.records]
        first_bad = next((number for number, offset in enumerate(offsets) if offset in guilty), len(offsets))
        assert outcome.done == first_bad
        assert (outcome.fault is Fault.RECORD) == (first_bad < len(offsets))
        assert [each.offset for each in handled if each.key == taken.records[0].key] == offsets[:first_bad]
    assert halves.rolled_back == bool(guilty)
    assert tries <= 1 + len(guilty) * 2 * 8


def test_a_lane_that_has_failed_before_is_not_mixed_with_others() -> None:
    queues = KeyQueues()
    queues.assign([TopicPartition("t", 0)])
    for offset, key in enumerate(b"aabb"):
        queues.add(Received("t", 0, offset, 0, bytes([key]), b"", (), str(offset)))
    batches = queues.take(4, 0.0)
    halves = Halves(batches, lambda each: each.records[0].key == b"a")
    parts = []
    while part := halves.next():
        parts.append([record.offset for _, record in part])
        if len(part) == 1:
            halves.single(Outcome(1))
        else:
            halves.done()
    assert parts == [[2, 3], [0], [1]]
    assert [each.done for each in halves.outcomes()] == [2, 2]


def test_where_the_database_is_away_what_is_done_stays_done() -> None:
    queues = KeyQueues()
    queues.assign([TopicPartition("t", 0)])
    for offset in range(4):
        queues.add(Received("t", 0, offset, 0, b"k", b"", (), str(offset)))
    halves = Halves(queues.take(4, 0.0), lambda each: False)
    assert len(halves.next()) == 4
    halves.failed(deadlock=True)
    assert len(halves.next()) == 2
    halves.done()
    assert len(halves.next()) == 2
    halves.away(lambda done: Outcome(done, again_in=0.5))
    assert halves.next() == []
    assert halves.outcomes() == [Outcome(2, again_in=0.5)]
    assert halves.deadlock
