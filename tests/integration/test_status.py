"""The backlog that `read_status` tells: counted while it is small, estimated at a bounded cost when it is large."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.harvester_registration import HarvesterRegistration
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.status import reader
from outbox_plugin.status.reader import read_status
from tests.harvesting import insert
from tests.support import eventually

pytestmark = pytest.mark.integration

ROWS = 3_000


@pytest.fixture(params=[1, 3])
def filled(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """An outbox with rows of many keys, split into as many shards."""
    settings = settings.model_copy(update={"shards": request.param})
    migrate(settings)
    with closing(connect(settings)) as connection:
        HarvesterRegistration(settings, connection).register_layout()
    insert(settings, "t", [(f"key-{number}", "x") for number in range(ROWS)])
    return settings


def test_a_small_backlog_is_counted(filled: Settings) -> None:
    found = read_status(filled)
    assert (found.backlog, found.backlog_is_estimated) == (ROWS, False)
    assert len(found.shards) == filled.shards
    assert sum(shard.lag_records for shard in found.shards) == ROWS
    assert found.oldest_seconds is not None


def test_exactly_as_many_rows_as_are_counted_are_no_estimate(filled: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "COUNTED_ROWS", ROWS)
    found = read_status(filled)
    assert (found.backlog, found.backlog_is_estimated) == (ROWS, False)


def test_a_large_backlog_is_estimated_by_its_ids(filled: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other row is gone: the estimate must tell rows from ids."""
    with closing(connect(filled)) as connection:
        connection.execute("DELETE FROM outbox WHERE id % 2 = 0")
    monkeypatch.setattr(reader, "COUNTED_ROWS", 200)
    found = read_status(filled)
    assert found.backlog is not None
    assert found.backlog_is_estimated
    assert abs(found.backlog - ROWS // 2) <= ROWS // 100
    assert abs(sum(shard.lag_records for shard in found.shards) - found.backlog) <= len(found.shards)


def test_old_rows_and_the_largest_id_say_nothing_of_how_many_rows_there_are(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as rows that are parked; one of them does not even say when it was created."""
    migrate(settings)
    insert(settings, "t", [("parked", "x")])
    with closing(connect(settings)) as connection:
        connection.execute("SELECT setval(pg_get_serial_sequence('outbox', 'id'), 5000000)")
        connection.execute("ALTER TABLE outbox ALTER create_time DROP NOT NULL")
        connection.execute("UPDATE outbox SET create_time = NULL")
        connection.execute("INSERT INTO outbox (id, kafka_topic, kafka_key) VALUES (9223372036854775807, 't', 'k')")
    assert read_status(settings).oldest_seconds is None
    insert(settings, "t", [(f"key-{number}", "x") for number in range(ROWS)])
    monkeypatch.setattr(reader, "COUNTED_ROWS", 200)
    found = read_status(settings)
    assert found.backlog is not None
    assert abs(found.backlog - ROWS) <= ROWS // 100


def test_an_empty_outbox_has_no_backlog(settings: Settings) -> None:
    migrate(settings)
    found = read_status(settings)
    assert (found.backlog, found.oldest_seconds, found.backlog_is_estimated) == (0, None, False)


def test_a_table_that_is_no_outbox_has_no_leader_without_trouble(settings: Settings) -> None:
    """Another outbox of the same group has one."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("CREATE TABLE copied (LIKE outbox INCLUDING ALL)")
    with Harvester(settings):
        eventually(lambda: read_status(settings).shards[0].leader, 60)
        [shard] = read_status(settings.model_copy(update={"table": "copied"})).shards
    assert shard.trouble == "no outbox is known as 'copied'; run `outbox migrate` first"
