"""What a database or a role sets for all its sessions does not stop a harvester."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.adapters.postgres_session import PostgresSession
from outbox_plugin.core.shards import Layout
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import by_key, consume, drained, insert
from tests.support import eventually

pytestmark = pytest.mark.integration


def by_default(settings: Settings, **defaults: str) -> None:
    """Let every new session of the database have these settings."""
    with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
        [(name,)] = connection.execute("SELECT current_database()").fetchall()
        for setting, value in defaults.items():
            query = sql.SQL("ALTER DATABASE {} SET {} = {}")
            connection.execute(query.format(sql.Identifier(str(name)), sql.Identifier(setting), sql.Literal(value)))


def test_sessions_with_nothing_to_do_are_not_ended(settings: Settings, topic: str) -> None:
    by_default(settings, idle_session_timeout="200ms")
    migrate(settings, wake_up=True)
    kept = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle' "
        "AND application_name LIKE 'outbox harvester (purge)%' AND state_change < clock_timestamp() - interval '1 s'"
    )

    def is_kept() -> bool:
        with psycopg.connect(settings.dsn.get_secret_value(), autocommit=True) as connection:
            return connection.execute(kept).fetchone() == (1,)

    insert(settings, topic, [("k", "1")])
    with Harvester(settings):
        drained(settings)
        eventually(is_kept, 60)
        insert(settings, topic, [("k", "2")])
        drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["1", "2"]}


def test_what_the_dsn_says_of_time_outs_goes_first(settings: Settings) -> None:
    dsn = settings.dsn.get_secret_value() + "?options=-c%20idle_session_timeout%3D12345"
    for given, expected in ((settings, "0"), (Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1"), "12345ms")):
        with closing(connect(given)) as connection:
            assert connection.execute("SHOW idle_session_timeout").fetchone() == (expected,)


def test_a_transaction_of_a_harvester_may_take_long(settings: Settings) -> None:
    with closing(connect(settings)) as connection:
        if connection.info.server_version < 170_000:
            pytest.skip("this server has no such time-out")
    by_default(settings, transaction_timeout="1min")
    with closing(PostgresSession(settings, 0, Layout(1, 1))) as session:
        for each in (session.reader, session.purger):
            assert each.execute("SHOW transaction_timeout").fetchone() == ("0",)
            assert each.execute("SHOW idle_session_timeout").fetchone() == ("0",)


def test_a_backslash_is_a_character_or_not(settings: Settings, topic: str) -> None:
    by_default(settings, standard_conforming_strings="off")
    keeping = settings.model_copy(update={"retention": timedelta(days=7)})
    migrate(keeping, wake_up=True)
    insert(settings, topic, [("k\\1", "1'\\'")])
    for _ in range(2):  # The second time, there are days of the history already.
        with Harvester(keeping):
            drained(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        days = connection.execute("SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox_history'::regclass")
        assert days.fetchone() == (2,)
    assert by_key(consume(settings, topic)) == {"k\\1": ["1'\\'"]}


def test_names_that_are_always_quoted_are_still_known(settings: Settings) -> None:
    """A harvester that does not find the sequence of the ids would not publish live rows before a backlog."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("ALTER SEQUENCE outbox_id_seq CACHE 7")
    by_default(settings, quote_all_identifiers="on")
    with closing(connect(settings)) as connection:
        [weakness] = HarvesterRegistration(settings, connection).weaknesses()
    assert "drawn 7 at a time" in weakness


def test_a_table_that_a_crash_empties_is_noted(settings: Settings) -> None:
    with closing(connect(settings)) as connection:
        assert HarvesterRegistration(settings, connection).weaknesses() == []
        connection.execute("ALTER TABLE outbox SET UNLOGGED")
        [weakness] = HarvesterRegistration(settings, connection).weaknesses()
    assert weakness == "the table outbox is UNLOGGED, so a crash of Postgres empties it: ALTER TABLE outbox SET LOGGED"
