"""Somebody else's locks and partitions in the same database hold nobody up, whatever plans Postgres makes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from outbox_plugin import Settings
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import by_key, consume, drained, environment, harvesters, insert, run_outbox
from tests.integration.test_database_defaults import by_default

pytestmark = pytest.mark.integration

# A table with all that one can have: a default, an identity, a trigger, a policy, an index and partitions.
NEIGHBOUR = """
    CREATE TABLE neighbour (id BIGSERIAL, name TEXT DEFAULT 'm', number INT GENERATED ALWAYS AS IDENTITY)
        PARTITION BY RANGE (name);
    CREATE TABLE neighbour_early PARTITION OF neighbour FOR VALUES FROM ('a') TO ('n');
    CREATE INDEX neighbour_by_name ON neighbour (lower(name));
    CREATE FUNCTION pass() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
    CREATE TRIGGER neighbour_pass BEFORE INSERT ON neighbour FOR EACH ROW WHEN (NEW.name <> '') EXECUTE FUNCTION pass();
    ALTER TABLE neighbour ENABLE ROW LEVEL SECURITY;
    CREATE POLICY neighbour_all ON neighbour USING (name <> '');
"""


@pytest.fixture
def crowded(settings: Settings) -> Iterator[Settings]:
    """Settings of an outbox; another session holds a neighbour's locks, and every plan reads whole catalogs."""
    migrate(settings.model_copy(update={"retention": timedelta(days=7)}), wake_up=True)
    plans = ("nestloop", "indexscan", "indexonlyscan", "bitmapscan", "material")
    by_default(settings, **{f"enable_{each}": "off" for each in plans})
    with psycopg.connect(settings.dsn.get_secret_value()) as holder:
        holder.execute(NEIGHBOUR)
        holder.commit()
        holder.execute("LOCK TABLE neighbour, neighbour_early IN ACCESS EXCLUSIVE MODE")
        holder.execute("ALTER SEQUENCE neighbour_id_seq INCREMENT 2")
        yield settings


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_harvester_relays(delivery: str, crowded: Settings, topic: str, tmp_path: Path) -> None:
    retention = timedelta(days=7) if delivery == "exactly-once" else None
    settings = crowded.model_copy(update={"delivery": delivery, "retention": retention})
    for number in range(2):  # The second time, there are days of the history already.
        with harvesters(settings, tmp_path) as [process]:
            insert(settings, topic, [("k", str(number))])
            drained(settings)
            assert process.terminate(seconds=60) == 0
    assert by_key(consume(settings, topic)) == {"k": ["0", "1"]}


def test_every_command_ends(crowded: Settings) -> None:
    for command in (
        ["migrate", "--wake-up"],
        ["status"],
        ["pause"],
        ["resume"],
        ["parked", "list"],
        ["dead-letters", "list"],
        ["inbox", "list"],
        ["grants", "--role", "harvester", "--to", "relay"],
        ["grants", "--role", "emitter", "--to", "app"],
    ):
        ended = run_outbox(*command, env=environment(crowded))
        assert (ended.returncode, ended.stderr) == (0, ""), command
