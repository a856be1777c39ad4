"""Housekeeping goes on whatever goes wrong: nobody looks whether its thread is there."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.errors import ServerRefused
from outbox_plugin.inbox import housekeeping
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.housekeeping import Housekeeping
from outbox_plugin.inbox.retention import Retention
from tests.support import eventually


class NothingToWrite:
    """Positions of an inbox that has none."""

    def write(self, connection: object, positions: object, *, unchanged: bool) -> None:
        pass


class Connection(nullcontext[None]):
    """It is closed, and does nothing else."""

    closed = False

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "problem",
    [
        psycopg.OperationalError("the server is away"),
        ServerRefused("the server that took over is too old"),
        OSError(24, "too many open files"),
        RuntimeError("can't start new thread"),
    ],
)
def test_housekeeping_goes_on_after_what_went_wrong(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing: list[Exception] = [problem] * 2
    cleaned: list[bool] = []

    def connect(settings: Settings, *, purpose: str) -> Connection:
        if failing:
            raise failing.pop()
        return Connection()

    def clean(*_: object) -> bool:
        cleaned.append(True)
        return False

    monkeypatch.setattr(housekeeping, "connect", connect)
    monkeypatch.setattr(housekeeping, "clean", clean)
    monkeypatch.setattr(housekeeping, "TROUBLE_SECONDS", 0.0)
    settings = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1")
    nothing: Any = NothingToWrite()
    keeper = Housekeeping(settings, "g", Dispatcher(1), nothing, dict, Retention(timedelta(1), timedelta(1)))
    with caplog.at_level(logging.WARNING, "outbox_plugin.inbox"):
        keeper.start()
        eventually(lambda: cleaned, 30)
    assert caplog.text.count("housekeeping") >= 2
    monkeypatch.setattr(Connection, "cancel_safe", lambda *_, **__: None, raising=False)
    keeper.stop()
    keeper.wait_until_ended()


def test_housekeeping_that_finds_no_dead_letters_wakes_no_worker() -> None:
    dispatcher, woken = Dispatcher(1), list[bool]()
    dispatcher.on_change(lambda: woken.append(True))
    dispatcher.add([])
    assert not woken
