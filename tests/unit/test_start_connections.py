"""How many connections a harvester opens before it relays anything."""

from __future__ import annotations

from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest

from outbox_plugin import Settings
from outbox_plugin.adapters import harvester_registration, postgres_wake_up
from outbox_plugin.adapters.harvester_registration import RegistrationConnection
from outbox_plugin.adapters.postgres_wake_up import PostgresWakeUp

SETTINGS = Settings(dsn="postgresql://nowhere/db", bootstrap_servers="127.0.0.1:1")


def test_a_harvester_registers_on_one_connection_until_postgres_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SimpleNamespace] = []

    def connect(*_: object, **__: object) -> SimpleNamespace:
        connection = SimpleNamespace(closed=False, close=lambda: None)
        connection.transaction = lambda force_rollback: nullcontext()
        connection.execute = lambda *_: SimpleNamespace(fetchone=lambda: ("public",))
        opened.append(connection)
        return connection

    monkeypatch.setattr(harvester_registration, "connect", connect)
    monkeypatch.setattr(harvester_registration, "with_schema", lambda *_: "outbox")
    with closing(RegistrationConnection(SETTINGS)) as connection:
        assert not opened
        for keep in (False, True):
            with connection.registration(keep=keep):
                assert len(opened) == 1
        opened[0].closed = True
        with connection.registration():
            assert len(opened) == 2


def test_a_term_connects_for_notifications_no_sooner_than_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SimpleNamespace] = []

    def connect(*_: object, **__: object) -> SimpleNamespace:
        answer = SimpleNamespace(fetchone=lambda: (True,))
        opened.append(SimpleNamespace(close=lambda: None, execute=lambda *_: answer))
        return opened[-1]

    monkeypatch.setattr(postgres_wake_up, "connect", connect)
    monkeypatch.setattr(postgres_wake_up, "with_schema", lambda *_: "outbox")
    with closing(PostgresWakeUp(SETTINGS, 0)) as wake_up:
        wake_up.interrupt()
        assert not opened
        assert wake_up.arm()
        wake_up.disarm()
        assert len(opened) == 1
