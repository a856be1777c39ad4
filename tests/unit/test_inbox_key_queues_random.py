"""Key queues under random steps: afterwards no count is wrong, and no key is blocked."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.key_queues import KeyBatch, KeyQueues, Outcome

PARTITION = TopicPartition("orders", 0)
SEEDS = 500


class Steps:
    """Random steps on the queues of one partition."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.queues = KeyQueues()
        self.taken: list[KeyBatch] = []
        self.now = 0.0
        self.offset = 0
        self.assign()

    def assign(self) -> None:
        if PARTITION not in self.queues.partitions():
            self.queues.assign([PARTITION], {"orders": "A"}, {PARTITION: self.offset})

    def add(self) -> None:
        letter = self.dice.randint(1, 4) if self.dice.random() < 0.2 else None
        if letter is None:
            self.offset = self.dice.choice((self.offset + 1, self.offset + 3, self.dice.randint(0, self.offset)))
        key = self.dice.choice((None, b"a", b"b"))
        size = self.dice.randint(1, 9)
        record: Any = SimpleNamespace(
            topic="orders", partition=0, offset=self.offset, key=key, size=size, dead_letter=letter
        )
        self.queues.add(record)

    def take(self) -> None:
        self.taken += self.queues.take(self.dice.randint(1, 4), self.now)
        keys = {each.queue.key for each in self.taken}
        assert len(keys) == len(self.taken), "a key is handled twice at a time"

    def finish(self) -> None:
        if self.taken:
            taken = self.taken.pop(self.dice.randrange(len(self.taken)))
            done = self.dice.randint(0, len(taken.records))
            again_in = None if done == len(taken.records) else 3.0
            self.queues.finish(taken, Outcome(done, again_in), self.now)

    def restart(self) -> None:
        if PARTITION in self.queues.partitions():
            self.queues.restart(PARTITION, self.dice.choice(("A", "B", None)))

    def revoke(self) -> None:
        self.queues.revoke([PARTITION])

    def drain(self) -> None:
        """Handle all that is left."""
        self.assign()
        for _ in range(50):
            self.now += 10.0
            for each in self.taken:
                self.queues.finish(each, Outcome(len(each.records)), self.now)
            self.taken = self.queues.take(100, self.now)


def _left_over(seed: int) -> str:
    steps = Steps(seed)
    kinds = (steps.add, steps.take, steps.finish, steps.restart, steps.revoke, steps.assign)
    for kind in steps.dice.choices(kinds, (35, 20, 30, 5, 4, 6), k=120):
        steps.now += 1.0
        kind()
    steps.drain()
    queues = steps.queues
    left = (*queues.load(), *queues.loads()[PARTITION], len(queues._blocked), len(queues._retried), len(queues._later))
    return f"seed {seed}: {left}" if any(left) else ""


def test_nothing_is_left_of_records_that_are_done() -> None:
    assert [found for seed in range(SEEDS) if (found := _left_over(seed))] == []


def test_a_key_that_stays_blocked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyQueues, "_unblock", lambda *_: None)
    assert any(_left_over(seed) for seed in range(SEEDS))
