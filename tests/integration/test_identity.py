"""Ids alone are not identity: tables that are truncated, dropped, restored, and outboxes that share a group."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.kafka import Names
from outbox_plugin.adapters.progress import read_progress
from outbox_plugin.core.shards import Slice
from outbox_plugin.errors import ForeignOutbox, SchemaMissing
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.status import read_status
from tests.harvesting import (
    backlog,
    by_key,
    consume,
    drained,
    insert,
    insert_numbered,
    publish_but_kill_before_the_purge,
)
from tests.support import eventually

pytestmark = pytest.mark.integration

ROWS = 2_000


@pytest.fixture
def killed_before_the_purge(settings: Settings, topic: str, tmp_path: Path) -> None:
    """A leader published `ROWS` rows and was killed before it could delete them: its progress record names them."""
    insert_numbered(settings, topic, 0, ROWS)
    publish_but_kill_before_the_purge(settings, tmp_path)


def relay_all(settings: Settings, topic: str) -> list[int]:
    with Harvester(settings):
        drained(settings)
    return sorted(int(record.value or -1) for record in consume(settings, topic))


@pytest.mark.usefixtures("killed_before_the_purge")
class TestAfterAKill:
    def test_a_truncated_and_refilled_table_loses_nothing(self, settings: Settings, topic: str) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("TRUNCATE outbox RESTART IDENTITY")
        insert_numbered(settings, topic, ROWS, ROWS)
        assert relay_all(settings, topic) == list(range(2 * ROWS))

    def test_even_when_the_new_rows_claim_to_be_as_old_as_the_old_ones(self, settings: Settings, topic: str) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("TRUNCATE outbox RESTART IDENTITY")
        insert_numbered(settings, topic, ROWS, ROWS)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("UPDATE outbox SET create_time = '2001-01-01'")
        assert relay_all(settings, topic) == list(range(2 * ROWS))

    def test_a_dropped_and_migrated_table_loses_nothing(self, settings: Settings, topic: str) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DROP TABLE outbox")
        assert migrate(settings)
        insert_numbered(settings, topic, ROWS, ROWS)
        assert relay_all(settings, topic) == list(range(2 * ROWS))

    def test_all_our_tables_dropped_and_migrated_anew(self, settings: Settings, topic: str) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        migrate(settings)
        insert_numbered(settings, topic, ROWS, ROWS)
        assert relay_all(settings, topic) == list(range(2 * ROWS))

    def test_a_table_made_anew_by_hand_is_not_guessed_at(self, settings: Settings) -> None:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("CREATE TABLE other (LIKE outbox INCLUDING ALL); DROP TABLE outbox CASCADE")
            connection.execute("ALTER TABLE other RENAME TO outbox")
        with pytest.raises(SchemaMissing, match="was dropped and made anew, or restored; run `outbox migrate`"):
            Harvester(settings).start()


def test_a_table_that_is_dropped_and_migrated_under_a_running_harvester(settings: Settings, topic: str) -> None:
    with Harvester(settings):
        insert(settings, topic, [("k", "before")])
        drained(settings)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DROP TABLE outbox")
        migrate(settings)
        insert(settings, topic, [("k", "after")])
        drained(settings)
        record = read_progress(settings, Names.of(settings), Slice(0, 1))
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        now = connection.execute("SELECT incarnation::text FROM outbox_identity").fetchone()
    assert record is not None
    assert (record.identity.incarnation,) == now
    assert by_key(consume(settings, topic)) == {"k": ["before", "after"]}


@pytest.mark.parametrize("first_runs", [True, False])
def test_two_outboxes_pointed_at_one_group_by_mistake(settings: Settings, topic: str, first_runs: bool) -> None:
    """The second is refused, whether the first one runs or only has run; nothing of either is deleted."""
    second = settings.model_copy(update={"table": "outbox_of_somebody_else"})
    migrate(second)
    insert(second, topic, [("k", "not ours")])
    first = Harvester(settings)
    first.start()
    insert(settings, topic, [("k", "ours")])
    drained(settings)
    if not first_runs:
        first.stop()
    try:
        with pytest.raises(ForeignOutbox, match=r"relays another outbox: outbox in .*OUTBOX_GROUP of its own"):
            Harvester(second).start()
    finally:
        first.stop()
    assert backlog(second) == 1
    assert by_key(consume(settings, topic)) == {"k": ["ours"]}


def test_a_second_group_on_one_outbox_is_refused_unless_it_adopts(settings: Settings, topic: str) -> None:
    """Fencing would not stop it: the two would publish every row twice."""
    with Harvester(settings):
        insert(settings, topic, [("k", "1")])
        drained(settings)
    other = settings.model_copy(update={"group": f"{settings.group}-other"})
    with pytest.raises(ForeignOutbox, match=f"the group '{settings.group}' harvests the outbox 'outbox'"):
        Harvester(other).start()
    insert(settings, topic, [("k", "2")])
    with Harvester(other, adopt=True):
        drained(settings)
    with pytest.raises(ForeignOutbox, match=f"the group '{other.group}' harvests"):
        Harvester(settings).start()
    assert by_key(consume(settings, topic)) == {"k": ["1", "2"]}


def test_a_group_is_taken_over_from_an_outbox_that_is_no_more(settings: Settings, topic: str) -> None:
    with Harvester(settings):
        insert(settings, topic, [("k", "1")])
        drained(settings)
    moved = settings.model_copy(update={"table": "outbox_moved"})
    migrate(moved)
    insert(moved, topic, [("k", "2")])
    with Harvester(moved, adopt=True):
        drained(moved)
    with Harvester(moved):
        insert(moved, topic, [("k", "3")])
        drained(moved)
    assert by_key(consume(settings, topic)) == {"k": ["1", "2", "3"]}


def test_ids_that_are_drawn_ahead_are_said_out_loud(settings: Settings) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("ALTER SEQUENCE outbox_id_seq CACHE 20")
    with Harvester(settings):
        eventually(lambda: "drawn 20 at a time" in (read_status(settings).shards[0].trouble or ""), 30)
