"""A schema or a table may have any name: one that psycopg or a function's body could misread changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from outbox_plugin import Event, Harvester, Outbox, Settings, operate
from outbox_plugin.schema.migrate import migrate, migrations
from outbox_plugin.schema.migration_script import migration_sql
from outbox_plugin.status.reader import read_status
from tests.harvesting import consume, create_topic, drained

pytestmark = pytest.mark.integration

SCHEMAS = ["100%s", "%(table)s%", "a$$b", "$do$", 'it\'s \\ "{outbox}" %% $emit$']


@pytest.fixture(params=SCHEMAS)
def awkward(request: pytest.FixtureRequest, unmigrated: Settings) -> Settings:
    """Settings for an empty schema, which only the search_path names."""
    dsn = unmigrated.dsn.get_secret_value()
    schema = sql.Identifier(request.param)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
        path = sql.SQL("ALTER ROLE CURRENT_USER IN DATABASE {} SET search_path = {}")
        connection.execute(path.format(sql.Identifier(connection.info.dbname), schema))
    return Settings(**{**unmigrated.model_dump(), "dsn": make_conninfo(dsn)})


def test_an_outbox_works_in_a_schema_of_any_name(awkward: Settings, unmigrated: Settings, group: str) -> None:
    assert migrate(awkward, wake_up=True) == list(migrations())
    assert migrate(awkward, wake_up=True) == []
    topic = create_topic(unmigrated, f"{group}-awkward")
    with psycopg.connect(awkward.dsn.get_secret_value()) as connection:
        Outbox().emit(connection, Event(topic=topic, key="k", value=1))
        connection.execute("SELECT outbox_emit(%s, 'k', '2')", [topic])
        Outbox().emit(connection, Event(topic=topic, key="k", value=3, timestamp=datetime.now(UTC)))
        connection.execute("SELECT outbox_emit_record(%s, 'k', '4')", [topic])
    with Harvester(awkward):
        drained(awkward)
    assert [record.value for record in consume(unmigrated, topic)] == ["1", "2", "3", "4"]
    assert operate.dead_letters(awkward) == []
    assert operate.parked_keys(awkward) == []
    assert read_status(awkward).backlog == 0


def test_what_a_dba_runs_makes_an_outbox_in_a_schema_of_any_name(awkward: Settings) -> None:
    with psycopg.connect(awkward.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute(migration_sql(awkward, wake_up=True))
    assert migrate(awkward) == []


def test_a_table_may_have_dollars_in_its_name(settings: Settings) -> None:
    named = Settings(**{**settings.model_dump(), "table": "a$$b", "group": f"{settings.group}-dollars"})
    assert migrate(named, wake_up=True) == migrations_of_a_second_outbox(named)
    with psycopg.connect(named.dsn.get_secret_value()) as connection:
        Outbox(named.table).emit(connection, Event(topic="t", key="k", value=1))
        connection.execute('SELECT "a$$b_emit"(%s, %s, %s)', ["t", "k", "2"])
        connection.execute('SELECT "a$$b_emit_record"(%s, %s, %s)', ["t", b"k", b"2"])
        assert connection.execute('SELECT count(*) FROM "a$$b"').fetchall() == [(3,)]


def migrations_of_a_second_outbox(settings: Settings) -> list[str]:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        applied = connection.execute("SELECT name FROM outbox_migration WHERE table_name = %s", [settings.table])
        return sorted(name for (name,) in applied)
