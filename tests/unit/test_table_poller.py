"""The thread that reads the table for metrics and readiness."""

from __future__ import annotations

import logging
from contextlib import closing

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.log_tenant import about_tenant
from outbox_plugin.observe import table_poller
from outbox_plugin.observe.table_poller import TablePoller
from tests.support import eventually


def test_a_table_that_cannot_be_read_is_logged_with_its_tenant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise psycopg.OperationalError("no connection")

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(table_poller, "connect", refuse)
    settings = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1")
    with about_tenant("tenant_a"):
        poller = TablePoller(settings, lambda _: None, lambda _: None)
    with closing(poller):
        eventually(lambda: caplog.messages, 30)
    assert caplog.messages[0].startswith("schema tenant_a: the outbox cannot be queried for metrics and /readyz: ")
