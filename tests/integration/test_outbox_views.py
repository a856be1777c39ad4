"""An outbox that is a view: of a table whose columns are somebody else's, as Debezium's outbox tables have them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from outbox_plugin import Harvester, Settings
from outbox_plugin.access.grants import postgres_grants
from outbox_plugin.access.roles import Role
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.errors import SchemaMissing, ServerRefused
from outbox_plugin.operate import pause, resume
from outbox_plugin.relay.events import HarvestEvent, RowsParked, TermBegan, TermFinished
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.schema.migration_script import migration_sql
from tests.harvesting import (
    assert_exactly_once_in_order,
    backlog,
    consume,
    create_topic,
    drained,
    environment,
    harvesters,
    publish_but_kill_before_the_purge,
    run_outbox,
)
from tests.postgres_sessions import leaders_asleep
from tests.roles import as_role, let_in
from tests.support import eventually

pytestmark = pytest.mark.integration

TABLE = """
CREATE SCHEMA shop;
CREATE TABLE shop.outboxevent (
    id             UUID PRIMARY KEY DEFAULT gen_random_uuid(),
    aggregatetype  VARCHAR(255) NOT NULL,
    aggregateid    VARCHAR(255),
    type           VARCHAR(255),
    payload        JSONB
);
INSERT INTO shop.outboxevent (aggregatetype, payload) VALUES ('before', '0');
ALTER TABLE shop.outboxevent ADD COLUMN place BIGINT, ADD COLUMN placed_at TIMESTAMPTZ, ADD COLUMN leader UUID;
CREATE SEQUENCE shop.places OWNED BY shop.outboxevent.place;
CREATE UNIQUE INDEX ON shop.outboxevent (place);
ALTER TABLE shop.outboxevent ALTER COLUMN place SET DEFAULT nextval('shop.places'),
                             ALTER COLUMN placed_at SET DEFAULT now();
"""
VIEW = """
CREATE VIEW shop.relayed AS
SELECT place AS id, placed_at AS create_time, aggregatetype AS kafka_topic, aggregateid AS kafka_key,
       payload::text AS kafka_value, ARRAY['id', 'type'] AS kafka_header_keys,
       ARRAY[id::text, coalesce(type, '')] AS kafka_header_values, leader AS leader_id, xmin AS xmin
FROM shop.outboxevent
WHERE place IS NOT NULL;
ALTER VIEW shop.relayed ALTER COLUMN id SET DEFAULT nextval('shop.places');
"""


def run(settings: Settings, script: str, *values: object) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(script, values or None)


@pytest.fixture
def viewed(unmigrated: Settings) -> Settings:
    """Settings for a view, with its table, that is not migrated yet."""
    run(unmigrated, TABLE + VIEW)
    return unmigrated.model_copy(update={"table": "shop.relayed"})


@pytest.fixture
def relayed(viewed: Settings) -> Settings:
    """The same, migrated."""
    migrate(viewed, wake_up=True)
    return viewed


@pytest.fixture
def topic(relayed: Settings, group: str) -> str:
    return create_topic(relayed, f"{group}-events")


def write(settings: Settings, topic: str, first: int, count: int) -> None:
    run(
        settings,
        "INSERT INTO shop.outboxevent (aggregatetype, aggregateid, type, payload) "
        "SELECT %s, 'key-' || i %% 7, 'Happened', to_jsonb(i) FROM generate_series(%s::int, %s::int) AS i",
        topic,
        first,
        first + count - 1,
    )


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_rows_are_relayed_and_deleted_from_the_table(relayed: Settings, topic: str, delivery: str) -> None:
    settings = relayed.model_copy(update={"delivery": delivery})
    with Harvester(settings):
        write(settings, topic, 1, 20_000)
        drained(settings)
        write(settings, topic, 20_001, 10)
        drained(settings)
    records = consume(settings, topic)
    assert_exactly_once_in_order(records, 1, 20_010)
    assert {name for record in records for name, _ in record.headers} == {"id", "type"}
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        assert connection.execute("SELECT aggregatetype FROM shop.outboxevent").fetchall() == [("before",)]


def test_a_writer_wakes_a_harvester_that_sleeps(relayed: Settings, topic: str) -> None:
    with Harvester(relayed), psycopg.connect(relayed.dsn.get_secret_value(), autocommit=True) as connection:
        connection.execute("LISTEN outbox")
        eventually(lambda: leaders_asleep(relayed) == 1, 60)
        write(relayed, topic, 1, 1)
        assert [each.payload for each in connection.notifies(timeout=20, stop_after=1)] == ["shop.relayed"]
        drained(relayed)


def test_nothing_is_lost_or_repeated_when_a_leader_is_killed(relayed: Settings, topic: str, tmp_path: Path) -> None:
    write(relayed, topic, 1, 5_000)
    publish_but_kill_before_the_purge(relayed, tmp_path)
    write(relayed, topic, 5_001, 5_000)
    with harvesters(relayed, tmp_path / "second"):
        drained(relayed)
    assert_exactly_once_in_order(consume(relayed, topic), 1, 10_000)


def test_a_role_with_the_rights_of_a_harvester_relays(relayed: Settings, topic: str, group: str) -> None:
    role = f"harvester_{group.replace('-', '_')}"
    run(relayed, f"CREATE ROLE {role} LOGIN; {postgres_grants(relayed, Role.HARVESTER, role)}")
    dsn = relayed.dsn.get_secret_value()
    let_in(dsn, role)
    try:
        write(relayed, topic, 1, 100)
        with Harvester(relayed.model_copy(update={"dsn": SecretStr(as_role(dsn, role))})):
            drained(relayed)
        assert_exactly_once_in_order(consume(relayed, topic), 1, 100)
    finally:
        run(relayed, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_table_that_is_truncated_is_another_incarnation(relayed: Settings, topic: str) -> None:
    with psycopg.connect(relayed.dsn.get_secret_value(), autocommit=True) as connection:
        query = "SELECT incarnation FROM shop.outbox_identity"
        before = connection.execute(query).fetchall()
        connection.execute("TRUNCATE shop.outboxevent")
        assert connection.execute(query).fetchall() != before
    with Harvester(relayed):
        write(relayed, topic, 1, 100)
        drained(relayed)
    assert_exactly_once_in_order(consume(relayed, topic), 1, 100)


@pytest.fixture
def parked(relayed: Settings, topic: str) -> Iterator[list[HarvestEvent]]:
    events: list[HarvestEvent] = []
    with Harvester(relayed, observe=events.append):
        yield events


def test_a_bad_row_parks_its_key(relayed: Settings, topic: str, parked: list[HarvestEvent]) -> None:
    write(relayed, "no such topic", 1, 1)
    write(relayed, topic, 1, 100)
    eventually(lambda: any(isinstance(event, RowsParked) for event in parked), 30)
    eventually(lambda: backlog(relayed) == 1, 30)


def test_a_pause_holds_the_rows(relayed: Settings, topic: str) -> None:
    pause(relayed)
    with Harvester(relayed):
        write(relayed, topic, 1, 10)
        assert not threading.Event().wait(1.0)
        assert backlog(relayed) == 10
        resume(relayed)
        drained(relayed)


@pytest.mark.parametrize("command", [("replay",), ("dead-letters", "retry", "--all")])
def test_nothing_can_be_written_through_it(relayed: Settings, command: tuple[str, ...]) -> None:
    done = run_outbox(*command, env=environment(relayed))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("outbox: 'shop.relayed' takes no rows (cannot insert into column \"kafka_value\" of view")
    assert line.endswith("if it is a view, insert the events into the table that it is a view of; nothing was changed")


def test_nothing_is_left_to_migrate(relayed: Settings) -> None:
    assert migrate(relayed) == []
    assert "TRIGGER" not in migration_sql(relayed)


def test_the_sql_for_somebody_else_does_the_same(viewed: Settings, group: str) -> None:
    run(viewed, migration_sql(viewed, wake_up=True))
    topic = create_topic(viewed, f"{group}-events")
    with Harvester(viewed):
        write(viewed, topic, 1, 100)
        drained(viewed)
    assert_exactly_once_in_order(consume(viewed, topic), 1, 100)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DROP INDEX shop.outboxevent_place_idx", "lets two rows have the same id"),
        ("ALTER SEQUENCE shop.places OWNED BY NONE", "lets two rows have the same id"),
        ("DROP TRIGGER outbox_truncated ON shop.outboxevent", "lacks the trigger"),
        (
            "CREATE OR REPLACE RULE kept AS ON DELETE TO shop.relayed DO INSTEAD NOTHING",
            "keeps the rows of the table 'shop.relayed' from being deleted",
        ),
    ],
)
def test_a_view_that_would_lose_or_repeat_rows_is_refused(relayed: Settings, change: str, said: str) -> None:
    run(relayed, change)
    with pytest.raises(SchemaMissing, match=said):
        Harvester(relayed).start()


def test_a_view_without_its_xmin_is_refused(unmigrated: Settings) -> None:
    run(unmigrated, TABLE + VIEW.replace(", xmin AS xmin", ""))
    with pytest.raises(SchemaMissing, match="xmin"):
        migrate(unmigrated.model_copy(update={"table": "shop.relayed"}))


def test_a_view_that_shows_another_creation_time_at_each_read_is_noticed(unmigrated: Settings, group: str) -> None:
    """A row could not be told from a later one of its id: it would be published at each sweep."""
    run(unmigrated, TABLE + VIEW.replace("placed_at AS create_time", "clock_timestamp() AS create_time"))
    settings = unmigrated.model_copy(update={"table": "shop.relayed"})
    migrate(settings)
    topic = create_topic(settings, f"{group}-events")
    events: list[HarvestEvent] = []

    def ended() -> list[str]:
        return [str(event.reason) for event in events if isinstance(event, TermFinished)]

    with Harvester(settings, observe=events.append):
        eventually(lambda: any(isinstance(event, TermBegan) for event in events), 60)
        write(settings, topic, 1, 20)
        eventually(lambda: len(ended()) > 2, 60)
    assert "another create_time than when they were read" in ended()[0]
    assert all("another one at each read" in reason for reason in ended()[1:3])
    assert_exactly_once_in_order(consume(settings, topic), 1, 20)
    with pytest.raises(SchemaMissing, match="another one at each read"):
        Harvester(settings).start()


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_creation_time_without_a_time_zone_is_refused_where_it_tells_rows(
    unmigrated: Settings, group: str, delivery: Delivery
) -> None:
    run(unmigrated, TABLE.replace("placed_at TIMESTAMPTZ", "placed_at TIMESTAMP") + VIEW)
    settings = unmigrated.model_copy(update={"table": "shop.relayed", "delivery": delivery})
    migrate(settings)
    topic = create_topic(settings, f"{group}-events")
    write(settings, topic, 1, 20)
    if delivery == "exactly-once":
        with pytest.raises(SchemaMissing, match=r"create_time of 'shop\.relayed' is a timestamp"):
            Harvester(settings).start()
        return
    with Harvester(settings):
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 1, 20)


def joined(settings: Settings, source: str) -> Settings:
    view = VIEW.replace("FROM shop.outboxevent", f"FROM {source}").replace("xmin AS", "outboxevent.xmin AS")
    run(settings, TABLE + "CREATE TABLE shop.second ();" + view.replace("id::text", "outboxevent.id::text"))
    return settings.model_copy(update={"table": "shop.relayed"})


def test_a_view_of_several_tables_is_refused(unmigrated: Settings) -> None:
    with pytest.raises(ServerRefused, match="not of one table"):
        migrate(joined(unmigrated, "shop.outboxevent CROSS JOIN shop.second"))


def test_a_view_that_rows_cannot_be_deleted_from_is_refused(unmigrated: Settings) -> None:
    settings = joined(unmigrated, "shop.outboxevent CROSS JOIN pg_catalog.pg_class AS other")
    migrate(settings)
    with pytest.raises(SchemaMissing, match="what it is made of, as a view, keeps the rows"):
        Harvester(settings).start()
