"""`outbox migrate` beside sessions that hold locks: it waits a little, lets others through, and says whose they are."""

from __future__ import annotations

import logging
import threading
import time

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.errors import ServerRefused
from outbox_plugin.schema import migrate as migrating
from outbox_plugin.schema.migrate import migrate
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def pending(settings: Settings) -> Settings:
    """A migration is to be applied that takes a table for itself."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("DELETE FROM outbox_migration WHERE name = '0006_pre_leaders'")
    return settings


def reader(settings: Settings) -> psycopg.Connection:
    connection = psycopg.connect(settings.dsn.get_secret_value(), application_name="a long report")
    connection.execute("SELECT FROM outbox_identity")
    return connection


def test_it_gives_up_in_time_and_says_who_holds_the_lock(pending: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrating, "PATIENCE_SECONDS", 3.0)
    began = time.monotonic()
    with reader(pending) as holder:
        pid = holder.info.backend_pid
        with pytest.raises(ServerRefused) as refused:
            migrate(pending)
    assert time.monotonic() - began < 10 * PATIENCE
    assert (refused.value.exit_code, str(refused.value).count("\n")) == (2, 0)
    assert f"session {pid} (a long report)" in str(refused.value)
    assert migrate(pending) == ["0006_pre_leaders"]


def test_others_go_on_while_it_waits_and_it_goes_on_after_them(
    pending: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asks for the table behind it would else wait as long as it does."""
    applied: list[str] = []
    migration = threading.Thread(target=lambda: applied.extend(migrate(pending)))
    with caplog.at_level(logging.WARNING), reader(pending) as holder:
        migration.start()
        eventually(lambda: "a long report" in caplog.text, 20)
        for _ in range(3):
            began = time.monotonic()
            with psycopg.connect(pending.dsn.get_secret_value()) as other:
                other.execute("SELECT FROM outbox_identity")
            assert time.monotonic() - began < 3 * PATIENCE
        holder.rollback()
        migration.join(90)
    assert applied == ["0006_pre_leaders"]
