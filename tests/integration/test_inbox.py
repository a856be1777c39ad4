"""An event has its effect once, in its key's order, whatever fails and whoever is killed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg
import pytest

from outbox_plugin import Event, Outbox, Settings
from outbox_plugin.inbox import Inbox, Received, Retry
from tests.consuming import effects, make_effect_table, produce, query, record_effect, values_by_key
from tests.support import eventually

pytestmark = pytest.mark.integration

SOON = 30.0
IMPATIENT = Retry(attempts=3, first_seconds=0.05, most_seconds=0.1)


@pytest.fixture
def ready(settings: Settings) -> Settings:
    """Settings for a database with a table for effects."""
    make_effect_table(settings)
    return settings


def test_an_event_has_its_effect_once_though_it_is_delivered_twice(ready: Settings, topic: str, group: str) -> None:
    sent = produce(ready, topic, [("a", "1"), ("b", "2"), (None, "3")])
    produce(ready, topic, [("a", "1"), ("b", "2"), (None, "3")], identities=sent)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        last = produce(ready, topic, [("a", "end"), ("b", "end"), ("c", "end"), ("d", "end")])
        eventually(lambda: {*last} <= {event for event, _, _ in effects(ready)}, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent + last)


def test_offsets_are_committed_and_another_start_goes_on_from_there(ready: Settings, topic: str, group: str) -> None:
    produce(ready, topic, [(f"k{each}", "1") for each in range(20)])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 20, SOON)
    query(ready, "DELETE FROM outbox_inbox")  # Now only offsets tell.
    more = produce(ready, topic, [("k0", "2")])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: {*more} <= {event for event, _, _ in effects(ready)}, SOON)
    assert len(effects(ready)) == 21


def test_each_group_has_its_own_effects(ready: Settings, topic: str, group: str) -> None:
    produce(ready, topic, [("a", "1")])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 1, SOON)
    with Inbox(ready, group=f"{group}-other", topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 2, SOON)


def test_a_failing_record_is_tried_again_in_its_place_while_other_keys_flow(
    ready: Settings, topic: str, group: str
) -> None:
    failures: list[float] = []
    others_done = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        if event.value == b"fails" and not others_done.is_set():
            failures.append(1)
            raise RuntimeError("not yet")

    produce(ready, topic, [("bad", "first"), ("bad", "fails"), ("bad", "last")])
    produce(ready, topic, [(f"good-{each}", "1") for each in range(50)])
    retry = Retry(attempts=10_000, first_seconds=0.02, most_seconds=0.05)
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=retry):
        eventually(lambda: len(values_by_key(ready)) == 51, SOON)
        eventually(lambda: len(failures) > 2, SOON)
        assert values_by_key(ready)["bad"] == ["first"]
        others_done.set()
        eventually(lambda: len(values_by_key(ready)["bad"]) == 3, SOON)
    assert values_by_key(ready)["bad"] == ["first", "fails", "last"]


def test_keys_are_handled_side_by_side_and_one_key_is_not(ready: Settings, topic: str, group: str) -> None:
    meeting = threading.Barrier(3)

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        meeting.wait(SOON)  # Only passed by three at once.
        record_effect(connection, event)

    produce(ready, topic, [("a", "1"), ("b", "1"), ("c", "1"), ("a", "2"), ("b", "2"), ("c", "2")])
    with Inbox(ready, group=group, topics=[topic], handler=handle, concurrency=3):
        eventually(lambda: len(effects(ready)) == 6, SOON)
    assert values_by_key(ready) == {key: ["1", "2"] for key in "abc"}


def test_a_handler_emits_in_the_same_transaction(ready: Settings, topic: str, group: str) -> None:
    outbox = Outbox()
    failed = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        record_effect(connection, event)
        outbox.emit(connection, Event(topic="replies", key="k", value=event.json()))
        if not failed.is_set():
            failed.set()
            raise RuntimeError("once")

    produce(ready, topic, [("a", '{"n": 1}')])
    with Inbox(ready, group=group, topics=[topic], handler=handle, retry=IMPATIENT):
        eventually(lambda: effects(ready), SOON)
    assert query(ready, "SELECT kafka_value FROM outbox") == [('{"n":1}',)]


def test_async_handlers_run_in_the_callers_event_loop(ready: Settings, topic: str, group: str) -> None:
    loops: set[asyncio.AbstractEventLoop] = set()

    async def handle(connection: psycopg.AsyncConnection[Any], event: Received) -> None:
        loops.add(asyncio.get_running_loop())
        await connection.execute(
            "INSERT INTO effect (event, key, value) VALUES (%s, %s, %s)", (event.idempotency_key, event.key_text, "")
        )

    async def live() -> None:
        async with Inbox(ready, group=group, topics=[topic], handler=handle):
            while len(await asyncio.to_thread(effects, ready)) < 200:
                await asyncio.sleep(0.02)
        assert loops == {asyncio.get_running_loop()}

    produce(ready, topic, [(f"k{each % 10}", "") for each in range(200)])
    asyncio.run(asyncio.wait_for(live(), SOON))
    assert len(effects(ready)) == 200
