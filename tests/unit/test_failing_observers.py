"""An observer decides nothing: what Prometheus' client or a user's own observer raises ends nothing else."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.coordination.events import ClaimLost
from outbox_plugin.coordination.heartbeat_timing import HeartbeatTiming
from outbox_plugin.coordination.instance import Instance
from outbox_plugin.coordination.partition_owners import Holder
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.inbox.events import TakenHandled
from outbox_plugin.inbox.inbox_telemetry import InboxTelemetry
from outbox_plugin.observe.guard import guarded, harmless
from outbox_plugin.observe.harvester_telemetry import HarvesterTelemetry
from outbox_plugin.relay.events import RowsRead

SETTINGS = Settings(dsn="postgresql://nowhere/db", bootstrap_servers="127.0.0.1:1")


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_inbox_goes_on_where_an_event_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = dict
    telemetry = InboxTelemetry(
        SETTINGS,
        f"127.0.0.1:{free_port()}",
        "g",
        ["t"],
        error=lambda: None,
        stopping=lambda: False,
        facts=nothing,
        next_offsets=nothing,
        paused=nothing,
    )
    try:
        monkeypatch.setattr(telemetry._metrics.handling, "observe", full)
        telemetry.observe(TakenHandled(1.0))
    finally:
        telemetry.close()


def test_a_harvester_goes_on_where_an_event_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = HarvesterTelemetry(
        SETTINGS, f"127.0.0.1:{free_port()}", error=lambda: None, stopping=lambda: False, now=lambda: 0.0
    )
    try:
        monkeypatch.setattr(telemetry._metrics._reads, "observe", full)
        telemetry.observe(RowsRead(0, 1, 1.0))
    finally:
        telemetry.close()


def test_the_log_has_the_first_failure_of_a_row(caplog: pytest.LogCaptureFixture) -> None:
    failing = [True, True, False, True]

    def count(_: None) -> None:
        if failing.pop(0):
            full()

    observe = guarded(count, "inbox g")
    with caplog.at_level(logging.WARNING, "outbox_plugin.observe"):
        for _ in range(4):
            observe(None)
    assert caplog.text.count("the metrics of inbox g miss events: [Errno 28] No space left") == 2


def test_what_ends_a_process_is_let_through() -> None:
    def end(_: None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(end, "inbox g")(None)


class Faulty:
    """A user's observer that raises an exception each time."""

    def __init__(self, error: BaseException) -> None:
        self.seen: list[Any] = []
        self._error = error

    def __call__(self, event: Any) -> None:
        self.seen.append(event)
        raise self._error


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_a_harvester_goes_on_where_a_users_observer_fails(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Faulty(error)
    harvester = Harvester(SETTINGS, observe=observer)
    with caplog.at_level(logging.WARNING, "outbox_plugin"):
        for _ in range(3):
            harvester._observe(RowsRead(0, 1, 1.0))
    assert len(observer.seen) == 3
    assert caplog.text.count("`observe` of the harvester raised an exception") == 1
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_a_consumer_goes_on_where_a_users_observer_fails(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    log: Any = SimpleNamespace(since=lambda _: 0.0, width=8, log_time=time.monotonic)
    observer = Faulty(error)
    timing = HeartbeatTiming(10.0, 300.0)
    instance = Instance(
        log, Holder("1", "one"), "billing", ["orders"], timing, at_most_once=False, limit=None, observe=observer
    )
    with caplog.at_level(logging.WARNING, "outbox_plugin"):
        for offset in range(3):
            instance._report(ClaimLost(TopicPartition("orders", 0), offset, "a test"))
    assert len(observer.seen) == 3
    assert caplog.text.count("`observe` of one raised an exception") == 1
    assert "Traceback" in caplog.text


def test_what_the_keyboard_ends_ends_with_an_observer_too() -> None:
    with pytest.raises(KeyboardInterrupt):
        harmless(Faulty(KeyboardInterrupt()), "one")(None)
