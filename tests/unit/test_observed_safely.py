"""Counting decides nothing: what Prometheus' client raises ends no harvester and no inbox."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from outbox_plugin import Settings
from outbox_plugin.embedded.ports import free_port
from outbox_plugin.inbox.events import TakenHandled
from outbox_plugin.inbox.observed import ObservedInbox
from outbox_plugin.observe.guard import guarded
from outbox_plugin.observe.harvester import ObservedHarvester
from outbox_plugin.relay.events import RowsRead

SETTINGS = Settings(dsn="postgresql://nowhere/db", bootstrap_servers="127.0.0.1:1")


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_inbox_goes_on_where_an_event_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = dict
    observed = ObservedInbox(
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
        monkeypatch.setattr(observed._metrics.handling, "observe", full)
        observed.observe(TakenHandled(1.0))
    finally:
        observed.close()


def test_a_harvester_goes_on_where_an_event_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = ObservedHarvester(
        SETTINGS, f"127.0.0.1:{free_port()}", error=lambda: None, stopping=lambda: False, now=lambda: 0.0
    )
    try:
        monkeypatch.setattr(observed._metrics._reads, "observe", full)
        observed.observe(RowsRead(0, 1, 1.0))
    finally:
        observed.close()


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
