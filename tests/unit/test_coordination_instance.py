"""What an instance does with its threads: whoever waits for the log is told when it cannot be followed any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Any

import pytest

from outbox_plugin.coordination.actions import Keep
from outbox_plugin.coordination.claims import Claim
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.instance import Instance
from outbox_plugin.coordination.state_topic import KeptState
from outbox_plugin.coordination.world import Holder
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import LogUnavailable, OutboxError
from tests.support import PATIENCE

ORDERS = TopicPartition("orders", 0)


class SilentLog:
    """Takes all messages, and shows none of them. It refuses us once it is `refusing`."""

    width = 8

    def __init__(self) -> None:
        self.kept = KeptState()
        self.refusing = threading.Event()

    def log_time(self) -> float:
        return time.time()

    def since(self, lookback_seconds: float) -> float:
        return time.time() - lookback_seconds

    def follow(self, partitions: Collection[int], since: float) -> list[Any]:
        return []

    def ask_for_forms(self, topics: Collection[str]) -> dict[str, Any]:
        return {}

    def check_forms(self, asked: Any) -> dict[str, Any]:
        return {}

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {}

    def send(self, message: Any, partition: int) -> None: ...

    def keep(self, positions: Collection[Keep], *, wait: bool = False) -> bool:
        return True

    def read(self, wait_seconds: float) -> list[Any]:
        if self.refusing.wait(wait_seconds):
            raise LogUnavailable("the topic is gone")
        return []

    def flush(self) -> None: ...


def test_who_waits_for_the_log_is_told_at_once_that_it_is_not_followed_any_more() -> None:
    log: Any = SilentLog()
    instance = Instance(
        log,
        Holder("run-1", "one"),
        "billing",
        ["orders"],
        HeartbeatTiming(10),
        at_most_once=True,
        limit=None,
        observe=lambda _: None,
    )
    instance.start()
    try:
        threading.Timer(0.2, log.refusing.set).start()
        began = time.monotonic()
        instance.promise({ORDERS: (Claim(0), 5)}, 30.0 * PATIENCE)
        assert time.monotonic() - began < 10.0 * PATIENCE
        with pytest.raises(OutboxError, match="the topic is gone"):
            instance.claims()
    finally:
        log.refusing.set()
        instance.stop(keep=False)
