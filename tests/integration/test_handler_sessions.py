"""What runs after a handler in its transaction does not rest on the session that the handler leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from outbox_plugin import Settings
from outbox_plugin.consuming import Received, consume_range
from outbox_plugin.consuming.positions import read_position
from outbox_plugin.errors import HandlerMisuse
from outbox_plugin.inbox import Inbox, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from tests.inbox_support import effects, make_effect_table, produce, query, record_effect
from tests.integration.test_consuming import CONSUMER, add, next_range, numbered, values
from tests.integration.test_inbox_faults import letters
from tests.support import eventually

pytestmark = pytest.mark.integration

SOON = 20.0
AT_ONCE = Retry(attempts=1)


@pytest.fixture
def ready(settings: Settings) -> Settings:
    """Settings for a database with a table for effects, and a schema `tenant` with tables named as ours, and a row."""
    make_effect_table(settings)
    query(settings, "CREATE SCHEMA tenant")
    for table in ("outbox_consumer_position", "outbox_inbox", "outbox_inbox_dead_letter"):
        query(settings, f"CREATE TABLE tenant.{table} (LIKE public.{table} INCLUDING ALL)")
    return settings


def rolls_back(connection: psycopg.Connection[Any], event: Received) -> None:
    record_effect(connection, event)
    if event.value == b"guilty":
        raise psycopg.Rollback


def test_an_event_whose_handler_raises_rollback_has_failed(ready: Settings, topic: str, group: str) -> None:
    sent = produce(ready, topic, [("a", "good"), ("b", "guilty"), ("c", "good"), ("b", "good")])
    with Inbox(ready, group=group, topics=[topic], handler=rolls_back, concurrency=1, retry=AT_ONCE):
        eventually(lambda: letters(ready) == [sent[1]], SOON)
        eventually(lambda: len(effects(ready)) == 3, SOON)
    assert "HandlerMisuse: the handler raised psycopg.Rollback" in DeadLetters(ready).list()[0].error


def test_an_event_whose_async_handler_raises_rollback_has_failed(ready: Settings, topic: str, group: str) -> None:
    async def handle(connection: psycopg.AsyncConnection[Any], events: list[Received]) -> None:
        raise psycopg.Rollback

    async def live() -> None:
        async with Inbox(ready, group=group, topics=[topic], handler=handle, batch_size=10, retry=AT_ONCE):
            await asyncio.to_thread(eventually, lambda: letters(ready) == sorted(sent), SOON)

    sent = produce(ready, topic, [("a", "1"), ("b", "2")])
    asyncio.run(live())


def test_a_range_whose_handler_raises_rollback_has_failed(ready: Settings, topic: str) -> None:
    def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        add(connection, records)
        raise psycopg.Rollback

    produce(ready, topic, numbered(0, 3))
    wanted = next_range(ready, topic)
    with pytest.raises(HandlerMisuse, match=r"raised psycopg\.Rollback"):
        consume_range(ready, wanted, handle)
    assert consume_range(ready, wanted, add).records == 3


@pytest.mark.parametrize("leaves", ["SET LOCAL search_path TO tenant", "SET search_path TO tenant, public"])
def test_the_position_is_moved_wherever_a_handler_leaves_the_search_path(
    ready: Settings, topic: str, leaves: str
) -> None:
    def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        add(connection, records)
        connection.execute(leaves.encode())

    produce(ready, topic, numbered(0, 3))
    wanted = next_range(ready, topic)
    query(ready, "INSERT INTO tenant.outbox_consumer_position VALUES (%s, '', %s, 'id', '{}')", CONSUMER, topic)
    assert consume_range(ready, wanted, handle).records == 3
    assert consume_range(ready, wanted, handle).again
    assert values(ready) == [0, 1, 2]
    assert query(ready, "SELECT next_offsets FROM tenant.outbox_consumer_position") == [({},)]


def test_a_range_whose_position_the_handler_removes_is_undone(ready: Settings, topic: str) -> None:
    def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        add(connection, records)
        connection.execute("DELETE FROM public.outbox_consumer_position")

    produce(ready, topic, numbered(0, 3))
    wanted = next_range(ready, topic)
    with pytest.raises(HandlerMisuse, match="position"):
        consume_range(ready, wanted, handle)
    assert values(ready) == []
    assert read_position(ready, CONSUMER, topic) is None


def test_a_handler_may_change_what_rows_look_like(ready: Settings, topic: str) -> None:
    def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        add(connection, records)
        connection.row_factory = dict_row

    produce(ready, topic, numbered(0, 3))
    assert consume_range(ready, next_range(ready, topic), handle).records == 3


def test_a_dead_letter_that_has_been_handled_is_removed_wherever_its_handler_leaves_the_search_path(
    ready: Settings, topic: str, group: str
) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.dead_letter is None:
            raise RuntimeError("not at first")
        record_effect(connection, event)
        connection.execute("SET LOCAL search_path TO tenant")

    [sent] = produce(ready, topic, [("a", "1")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=AT_ONCE):
        eventually(lambda: letters(ready) == [sent], SOON)
        DeadLetters(ready).retry(None)
        eventually(lambda: letters(ready) == [] or len(effects(ready)) > 1, SOON)
    assert [event for event, _, _ in effects(ready)] == [sent]
    assert letters(ready) == []


def test_claims_are_taken_back_wherever_a_handler_that_commits_and_fails_leaves_the_search_path(
    ready: Settings, topic: str, group: str
) -> None:
    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        connection.execute("SET search_path TO tenant")
        connection.execute("COMMIT")
        raise RuntimeError("half-way")

    [sent] = produce(ready, topic, [("a", "1")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=AT_ONCE):
        eventually(lambda: letters(ready) == [sent], SOON)


NOTE = """
CREATE FUNCTION note_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO effect (event, key, value) VALUES ('dead letter', '', current_setting('synchronous_commit'));
    RETURN NULL;
END $$
"""


def test_the_commit_of_effects_is_durable_whatever_the_default(ready: Settings, topic: str, group: str) -> None:
    """Kafka's offset moves after it: what a crash undid would not come again."""
    seen: list[str] = []

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        seen.extend(value for (value,) in connection.execute("SHOW synchronous_commit").fetchall())
        if event.dead_letter is None:
            raise RuntimeError("not at first")

    query(
        ready,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %%I SET synchronous_commit = off', current_database()); END $$",
    )
    query(ready, NOTE)
    query(ready, "CREATE TRIGGER note AFTER INSERT ON outbox_inbox_dead_letter EXECUTE FUNCTION note_commit()")
    [sent] = produce(ready, topic, [("a", "1")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=AT_ONCE):
        eventually(lambda: letters(ready) == [sent], SOON)
        DeadLetters(ready).retry(None)
        eventually(lambda: letters(ready) == [], SOON)
    assert seen == ["on", "on"]
    assert [value for _, _, value in effects(ready)] == ["on"]


def test_the_server_notices_the_loss_of_a_machine_that_holds_a_position(ready: Settings, topic: str) -> None:
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    seen: list[str] = []

    def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        for name in names:
            seen.extend(value for (value,) in connection.execute(f"SHOW {name}".encode()).fetchall())

    produce(ready, topic, numbered(0, 3))
    consume_range(ready, next_range(ready, topic), handle)
    assert seen == ["5", "2", "3", "10000"]
