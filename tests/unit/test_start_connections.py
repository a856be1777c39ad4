"""How many connections a harvester opens before it relays anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from types import SimpleNamespace

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.adapters import harvester_registration, postgres_wake_up
from outbox_plugin.adapters.harvester_registration import RegistrationConnection
from outbox_plugin.adapters.postgres_wake_up import PostgresWakeUp
from outbox_plugin.errors import ServerRefused
from outbox_plugin.harvester import Harvester

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


class Session:
    """A connection that Postgres, or what is between, has ended while it was idle: it looks open until it is used."""

    def __init__(self, ends_with: psycopg.Error | None, *, stays_open: bool = False) -> None:
        self.closed = False
        self._ends_with = ends_with
        self._stays_open = stays_open

    @contextmanager
    def transaction(self, **_: object) -> Iterator[None]:
        if self._ends_with is not None:
            self.closed = not self._stays_open
            raise self._ends_with
        yield

    def execute(self, *_: object) -> None: ...

    def close(self) -> None:
        self.closed = True


LOST = psycopg.OperationalError("server closed the connection unexpectedly")
NOT_THERE = psycopg.OperationalError("connection refused")


class Postgres:
    """Gives out connections that end as planned, or none."""

    def __init__(self, *sessions: Session | psycopg.Error) -> None:
        self._sessions = sessions
        self.asked = 0

    def connect(self, *_: object, **__: object) -> Session:
        session = self._sessions[self.asked]
        self.asked += 1
        if isinstance(session, psycopg.Error):
            raise session
        return session


def registered(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a harvester registers."""

    def attempt(connection: RegistrationConnection) -> bool:
        with connection.registration():
            return True

    monkeypatch.setattr(harvester_registration, "connect", postgres.connect)
    monkeypatch.setattr(harvester_registration, "with_schema", lambda *_: "outbox")
    with closing(RegistrationConnection(SETTINGS)) as connection:
        return Harvester(SETTINGS)._register(connection, attempt)


@pytest.mark.parametrize(
    "ends_with",
    [
        LOST,
        psycopg.errors.AdminShutdown("terminating connection due to administrator command"),
        psycopg.errors.IdleInTransactionSessionTimeout("terminating connection due to a time-out"),
    ],
)
def test_a_harvester_registers_again_where_postgres_has_ended_its_idle_connection(
    monkeypatch: pytest.MonkeyPatch, ends_with: psycopg.Error
) -> None:
    postgres = Postgres(Session(ends_with), Session(None))
    assert registered(postgres, monkeypatch)
    assert postgres.asked == 2


@pytest.mark.parametrize(
    ("sessions", "asked"),
    [
        pytest.param([Session(LOST), Session(LOST)], 2, id="the next connection is ended too"),
        pytest.param([Session(LOST), NOT_THERE], 2, id="Postgres is gone by now"),
        pytest.param([NOT_THERE], 1, id="Postgres was never there"),
        pytest.param([Session(LOST, stays_open=True)], 1, id="the connection is not the matter"),
    ],
)
def test_a_harvester_is_refused_where_another_connection_does_not_help(
    monkeypatch: pytest.MonkeyPatch, sessions: list[Session | psycopg.Error], asked: int
) -> None:
    postgres = Postgres(*sessions)
    with pytest.raises(ServerRefused):
        registered(postgres, monkeypatch)
    assert postgres.asked == asked


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
