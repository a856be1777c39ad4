"""A consumer is ready where it makes progress or has nothing to do: each rule, at its threshold and past it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_plugin.coordination.consumer_readiness import (
    ALIVE_SECONDS,
    FOLLOWED_SECONDS,
    KAFKA_SECONDS,
    POLLED_SECONDS,
    ConsumerFacts,
    is_alive,
    readiness,
)
from outbox_plugin.core.readiness import NotReady, Ready
from outbox_plugin.core.topic_partition import TopicPartition

NOW = 1_000.0
WELL = ConsumerFacts(NOW, NOW, NOW, {TopicPartition("orders", 0): 7})
IDLE = replace(WELL, offsets={}, polled_at=NOW - POLLED_SECONDS - 1)


@pytest.mark.parametrize(
    ("facts", "kafka_at", "verdict"),
    [
        (WELL, NOW, Ready("holds 1 partitions")),
        (replace(WELL, followed_at=NOW - FOLLOWED_SECONDS), NOW, Ready("holds 1 partitions")),
        (WELL, NOW - KAFKA_SECONDS, Ready("holds 1 partitions")),
        (replace(WELL, polled_at=NOW - POLLED_SECONDS), NOW, Ready("holds 1 partitions")),
        (IDLE, NOW, Ready("has no partitions")),
        (replace(WELL, followed_at=None), NOW, NotReady("the consumer is starting")),
        (
            replace(WELL, followed_at=NOW - FOLLOWED_SECONDS - 1),
            NOW,
            NotReady("the coordination topic has not been read for 11 s"),
        ),
        (IDLE, None, NotReady("Kafka has not answered yet: gone")),
        (WELL, NOW - KAFKA_SECONDS - 1, NotReady("Kafka has not answered for 16 s: gone")),
        (
            replace(WELL, all_confirmed=False),
            NOW,
            NotReady("the coordination topic does not confirm what it holds"),
        ),
        (replace(WELL, polled_at=NOW - POLLED_SECONDS - 1), NOW, NotReady("nobody has polled for 61 s")),
    ],
)
def test_who_makes_progress_is_ready(facts: ConsumerFacts, kafka_at: float | None, verdict: object) -> None:
    assert readiness(facts, kafka_at, "gone", NOW) == verdict


@pytest.mark.parametrize(
    ("runs", "followed_at", "alive"),
    [
        (True, None, True),
        (True, NOW - ALIVE_SECONDS, True),
        (True, NOW - ALIVE_SECONDS - 1, False),
        (False, NOW, False),
    ],
)
def test_alive_is_who_follows(runs: bool, followed_at: float | None, alive: bool) -> None:
    assert is_alive(runs=runs, followed_at=followed_at, now=NOW) is alive
