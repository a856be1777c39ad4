"""At-least-once delivery: nothing is lost or overtaken, and rows and election can be shared with goharvest.

And what a leader of either delivery says of a lock that it waits for.
"""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer

from outbox_plugin import Harvester, Settings
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.relay.shard import LONG_POSTGRES_WAIT
from outbox_plugin.status.reader import read_status
from tests.harvesting import (
    assert_first_appearances_in_order,
    backlog,
    by_key,
    consume,
    create_topic,
    drained,
    harvesters,
    insert,
    insert_numbered,
    members,
)
from tests.support import eventually

pytestmark = pytest.mark.integration

ANOTHERS = "8f2b0f9e-57ac-4b1c-9d2a-2b1c3d4e5f60"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"delivery": "at-least-once"})


def test_rows_arrive_in_order_once_while_nothing_fails(settings: Settings, topic: str) -> None:
    insert_numbered(settings, topic, 0, 10_000, keys=50)
    with Harvester(settings):
        drained(settings)
    records = consume(settings, topic)
    assert len(records) == 10_000
    assert_first_appearances_in_order(records, 0, 10_000)


@pytest.mark.slow
def test_kills_repeat_but_lose_and_overtake_nothing(settings: Settings, topic: str, tmp_path: Path) -> None:
    rows = 30_000
    for number in range(3):
        insert_numbered(settings, topic, number * rows, rows)
        with harvesters(settings, tmp_path / str(number)) as [harvester]:
            eventually(lambda: backlog(settings) < rows, 60)
            harvester.signal(signal.SIGKILL)
    with Harvester(settings):
        drained(settings)
    assert_first_appearances_in_order(consume(settings, topic), 0, 3 * rows)


def test_rows_that_another_leader_marked_are_marked_again(settings: Settings, topic: str) -> None:
    insert(settings, topic, [("k", "1"), ("k", "2")])
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("UPDATE outbox SET leader_id = %s WHERE kafka_value = '1'", (ANOTHERS,))
    with Harvester(settings):
        drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["1", "2"]}


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_leader_that_waits_for_a_lock_for_long_says_so(settings: Settings, topic: str, delivery: Delivery) -> None:
    """A transaction that was left open, or prepared, may keep rows locked for ever."""
    insert(settings, topic, [("k", "1")])
    with psycopg.connect(settings.dsn.get_secret_value()) as owner:
        owner.execute("SELECT FROM outbox FOR UPDATE")
        with Harvester(settings.model_copy(update={"delivery": delivery})):
            eventually(lambda: read_status(settings).shards[0].trouble == LONG_POSTGRES_WAIT, 60)
            owner.rollback()
            eventually(lambda: read_status(settings).shards[0].trouble is None, 60)
            drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["1"]}


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("busy", [False, True], ids=["asks for parked keys", "parks a key"])
def test_a_leader_that_waits_for_another_lock_for_long_says_so(
    settings: Settings, topic: str, delivery: Delivery, busy: bool
) -> None:
    """It waits for a table beside the outbox when it asks for commands, and when it parks a key."""
    with (
        psycopg.connect(settings.dsn.get_secret_value()) as other,
        Harvester(settings.model_copy(update={"delivery": delivery})),
    ):
        insert(settings, topic, [("k", "1")])
        drained(settings)
        other.execute(f"LOCK TABLE outbox_parked IN {'SHARE' if busy else 'ACCESS EXCLUSIVE'} MODE")
        if busy:
            insert(settings, topic, [("bad", "x" * 2_000_000)])
        eventually(lambda: trouble(settings) == LONG_POSTGRES_WAIT, 60)
        other.rollback()
        eventually(lambda: trouble(settings) is None, 60)


def trouble(settings: Settings) -> str | None:
    return read_status(settings).shards[0].trouble


def test_it_takes_turns_with_whoever_else_is_in_the_leader_group(settings: Settings, topic: str, group: str) -> None:
    """As goharvest is: a member of the leader group, with an older assignor, that owns the leader topic's partition."""
    shared = {"leader_topic": create_topic(settings, f"{group}.neli", 1), "leader_group": f"{group}.goharvest"}
    settings = settings.model_copy(update=shared)
    another = Consumer(
        {
            "bootstrap.servers": settings.bootstrap_servers,
            "group.id": shared["leader_group"],
            "partition.assignment.strategy": "range",
        }
    )
    with closing(another):
        another.subscribe([shared["leader_topic"]])
        eventually(lambda: another.poll(0.1) is None and another.assignment(), 60)
        with Harvester(settings):
            insert(settings, topic, [("k", "1")])
            eventually(lambda: another.poll(0.1) is not None or len(members(settings)) == 2, 60)
            assert backlog(settings) == 1
            another.close()
            drained(settings)
    assert by_key(consume(settings, topic)) == {"k": ["1"]}
