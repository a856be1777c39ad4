"""What an instance does with its threads: whoever waits for the log is told when it cannot be followed any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_plugin.coordination import instance
from outbox_plugin.coordination.actions import KeepPosition
from outbox_plugin.coordination.claims import Claim
from outbox_plugin.coordination.group_view import TopicForm
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.instance import Instance
from outbox_plugin.coordination.messages import ClaimingMessages, Entry
from outbox_plugin.coordination.partition_owners import Holder
from outbox_plugin.coordination.state_topic import KeptState
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import LogUnavailable, OutboxError
from tests.support import PATIENCE, eventually

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

    def keep(self, positions: Collection[KeepPosition], *, wait: bool = False) -> bool:
        return True

    def read(self, wait_seconds: float) -> list[Any]:
        if self.refusing.wait(wait_seconds):
            raise LogUnavailable("the topic is gone")
        return []

    def flush(self) -> None: ...


class StoppedProcess(SilentLog):
    """Takes all messages, and shows them. As soon as a request for records has been read, the process is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped_seconds = 0.0
        self.kept_before_handing_out: list[KeepPosition] = []
        self._entries: list[Entry] = []
        self._read = 0

    def monotonic(self) -> float:
        return time.monotonic() + self.stopped_seconds

    def log_time(self) -> float:
        return time.time() + self.stopped_seconds

    def check_forms(self, asked: Any) -> dict[str, Any]:
        return {"orders": TopicForm(1, "id-1")}

    def send(self, message: Any, partition: int) -> None:
        self._entries.append(Entry(partition, len(self._entries), self.log_time(), message))

    def read(self, wait_seconds: float) -> list[Any]:
        super().read(wait_seconds)
        found, self._read = self._entries[self._read :], len(self._entries)
        if any(isinstance(entry.message, ClaimingMessages) for entry in found):
            self.stopped_seconds = 25.0
        return found

    def keep(self, positions: Collection[KeepPosition], *, wait: bool = False) -> bool:
        self.kept_before_handing_out += positions if wait else ()
        return True


def test_at_most_once_nothing_is_kept_of_a_partition_that_another_may_hold_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one may have kept more, and be gone. What we keep behind that is the last record of its key."""
    log: Any = StoppedProcess()
    monkeypatch.setattr(instance, "time", SimpleNamespace(monotonic=log.monotonic))
    started = start(log)
    try:
        eventually(lambda: ORDERS in started.held(), 20)
        claim = started.claims()[ORDERS]
        started.promise({ORDERS: (claim, 100)}, 30.0)
        assert log.stopped_seconds
        assert log.kept_before_handing_out == []
        assert claim.promised == 0
    finally:
        log.refusing.set()
        started.stop(keep=False)


def start(log: Any) -> Instance:
    started = Instance(
        log,
        Holder("run-1", "one"),
        "billing",
        ["orders"],
        HeartbeatTiming(10),
        at_most_once=True,
        limit=None,
        observe=lambda _: None,
    )
    started.start()
    return started


def test_who_waits_for_the_log_is_told_at_once_that_it_is_not_followed_any_more() -> None:
    log: Any = SilentLog()
    started = start(log)
    try:
        threading.Timer(0.2, log.refusing.set).start()
        began = time.monotonic()
        started.promise({ORDERS: (Claim(0), 5)}, 30.0 * PATIENCE)
        assert time.monotonic() - began < 10.0 * PATIENCE
        with pytest.raises(OutboxError, match="the topic is gone"):
            started.claims()
    finally:
        log.refusing.set()
        started.stop(keep=False)
