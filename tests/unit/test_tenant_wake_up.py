"""How the thread that listens to writers gets over what goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from unittest import mock

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.adapters import tenant_wake_up
from outbox_plugin.adapters.tenant_wake_up import TenantWakeUp
from outbox_plugin.core.backoff import Backoff
from tests.support import eventually

PATTERN = Settings(dsn="postgresql://nowhere/db", bootstrap_servers="h:1", table="tenant_*.outbox")


@contextmanager
def resting(attempt: mock.Mock) -> Iterator[TenantWakeUp]:
    """One tenant is at rest; to connect is `attempt`."""
    with (
        mock.patch.object(tenant_wake_up, "connect", attempt),
        mock.patch.object(tenant_wake_up, "_RETRY_FIRST", 0.01),
        closing(TenantWakeUp(PATTERN, lambda _: None)) as wake_up,
    ):
        wake_up.follow(["tenant_a"])
        yield wake_up


def test_an_unexpected_error_does_not_end_the_wake_ups_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Such as that no thread can be started to connect on."""
    caplog.set_level(logging.WARNING)
    attempt = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    with resting(attempt):
        eventually(lambda: attempt.call_count >= 4, 30)
    assert [record.message for record in caplog.records].count(
        "writers do not wake tenants at rest: can't start new thread"
    ) == 1


def test_a_server_that_refuses_what_follows_the_connection_is_asked_ever_less_often() -> None:
    """A standby takes connections, and lets nobody listen."""
    refusing = mock.Mock()
    refusing.return_value.execute.side_effect = psycopg.errors.ReadOnlySqlTransaction("during recovery")
    waits: list[float] = []

    class Noted(Backoff):
        def wait(self, jitter: float = 0.0) -> float:
            waits.append(super().wait(jitter))
            return 0.0

    with mock.patch.object(tenant_wake_up, "Backoff", Noted), resting(refusing):
        eventually(lambda: len(waits) >= 4, 30)
    assert waits[:4] == [0.01, 0.02, 0.04, 0.08]
