"""A handler that takes a batch: each event has its effect once, and only the guilty one is a dead letter."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin import Settings
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.inbox import Inbox, Received, Retry, poll_loop
from outbox_plugin.inbox.dead_letters import DeadLetters
from tests.inbox_support import effects, produce, query, record_effect, record_effects, values_by_key
from tests.inbox_worker import end_workers, start_worker
from tests.integration.test_inbox_faults import letters, numbered
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

CHECKOUT = Path(__file__).resolve().parents[2]
SOON = 60.0


def test_each_event_has_its_effect_once_in_its_keys_order(ready: Settings, topic: str, group: str) -> None:
    sizes: list[int] = []

    def handle(connection: psycopg.Connection[Any], events: list[Received]) -> None:
        sizes.append(len(events))
        record_effects(connection, events)

    sent = produce(ready, topic, [(f"k{each % 50}", str(each)) for each in range(3_000)])
    produce(ready, topic, [(f"k{each % 50}", "again") for each in range(3_000)], identities=sent)
    last = produce(ready, topic, [(f"k{each % 50}", "end") for each in range(50)])
    with Inbox(ready, group=group, topics=[topic], handler=handle, batch_size=700):
        eventually(lambda: {*last} <= {event for event, _, _ in effects(ready)}, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent + last)
    assert values_by_key(ready) == {
        f"k{key}": [*(str(each) for each in range(key, 3_000, 50)), "end"] for key in range(50)
    }
    assert max(sizes) <= 700
    assert len(sizes) < 300


@pytest.mark.parametrize("guilt", ["raises", "swallows", "rolls back", "prepares", "closes", "commits"])
def test_a_batch_that_fails_is_halved_until_the_guilty_event_is_alone(
    ready: Settings, topic: str, group: str, guilt: str
) -> None:
    def handle(connection: psycopg.Connection[Any], events: list[Received]) -> None:
        record_effects(connection, events)
        for event in events:
            if event.value == b"guilty":
                if guilt == "raises":
                    raise RuntimeError("it is guilty")
                if guilt == "closes":
                    connection.close()
                elif guilt == "swallows":
                    try:
                        connection.execute("SELECT 1 / 0")
                    except psycopg.Error:
                        return
                else:
                    does = {"rolls back": "ROLLBACK", "prepares": f"PREPARE TRANSACTION '{event.idempotency_key}'"}
                    connection.execute(does.get(guilt, "COMMIT").encode())
                    return

    sent = numbered(ready, topic, {0, 150, 151, 299})
    guilty = [sent[number] for number in (0, 150, 151, 299)]
    with Inbox(ready, group=group, topics=[topic], handler=handle, batch_size=100, retry=Retry(2, 0.05, 0.1)):
        eventually(lambda: {*sent} <= {event for event, _, _ in effects(ready)} | {*letters(ready)}, SOON)
    if guilt == "commits":
        assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)
    else:
        assert sorted(event for event, _, _ in effects(ready)) == sorted({*sent} - {*guilty})
        assert letters(ready) == sorted(guilty)


def test_a_dead_letter_is_tried_again_as_a_batch_of_one(ready: Settings, topic: str, group: str) -> None:
    mended = False

    def handle(connection: psycopg.Connection[Any], events: list[Received]) -> None:
        if any(event.value == b"guilty" for event in events) and not mended:
            raise RuntimeError("not yet")
        record_effects(connection, events)

    sent = numbered(ready, topic, {7})
    with Inbox(ready, group=group, topics=[topic], handler=handle, batch_size=100, retry=Retry(attempts=1)):
        eventually(lambda: letters(ready) == [sent[7]], SOON)
        mended = True
        DeadLetters(ready).retry(None)
        eventually(lambda: len(effects(ready)) == 300, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)


def test_an_async_handler_takes_batches_too(ready: Settings, topic: str, group: str) -> None:
    async def handle(connection: psycopg.AsyncConnection[Any], events: list[Received]) -> None:
        if any(event.value == b"guilty" for event in events):
            raise RuntimeError("it is guilty")
        keys = [event.idempotency_key for event in events]
        await connection.execute("INSERT INTO effect (event) SELECT unnest(%s::text[])", (keys,))

    async def live() -> None:
        async with Inbox(ready, group=group, topics=[topic], handler=handle, batch_size=100, retry=Retry(attempts=1)):
            while len(await asyncio.to_thread(effects, ready)) < 298:
                await asyncio.sleep(0.05)

    sent = numbered(ready, topic, {3, 30})
    asyncio.run(asyncio.wait_for(live(), SOON * PATIENCE))
    assert letters(ready) == sorted([sent[3], sent[30]])


def test_kill_9_in_the_middle_of_batches_neither_loses_nor_repeats_an_effect(
    ready: Settings, topic: str, group: str
) -> None:
    running = [start_worker(ready, group, topic, "2", "200") for _ in range(2)]
    try:
        sent = produce(ready, topic, [(f"k{each % 50}", str(each)) for each in range(6_000)])
        for number, enough in enumerate((200, 2_500)):
            eventually(lambda enough=enough: len(effects(ready)) >= enough, SOON)  # type: ignore[misc]
            running[number].kill()
            running[number].communicate(timeout=90)
            running[number] = start_worker(ready, group, topic, "2", "200")
        eventually(lambda: len(effects(ready)) >= 6_000, SOON)
    finally:
        codes = end_workers(running)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)
    assert values_by_key(ready) == {f"k{key}": [str(each) for each in range(key, 6_000, 50)] for key in range(50)}
    assert codes == [0, 0]


def test_a_full_inbox_pauses_only_where_handlers_do_not_make_room(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is paused is fetched again: librdkafka drops it."""
    pauses: list[float] = []
    slow = threading.Event()

    class Noting(Consumer):
        def pause(self, partitions: list[KafkaTopicPartition]) -> None:
            pauses.append(time.monotonic())
            super().pause(partitions)

    def handle(connection: psycopg.Connection[Any], events: list[Received]) -> None:
        if slow.is_set():
            eventually(lambda: pauses, SOON)
        record_effects(connection, events)

    monkeypatch.setattr("outbox_plugin.inbox.consumer.Consumer", Noting)
    monkeypatch.setattr(poll_loop, "MEMORY_LIMIT", replace(poll_loop.MEMORY_LIMIT, records=500))
    monkeypatch.setattr("outbox_plugin.inbox.poll_loop.ROOM_SECONDS", 60.0)
    sent = produce(ready, topic, [(f"k{each % 50}", str(each)) for each in range(5_000)])
    with Inbox(ready, group=group, topics=[topic], handler=handle, batch_size=100):
        eventually(lambda: len(effects(ready)) == 5_000, SOON)
        assert pauses == []
        monkeypatch.setattr("outbox_plugin.inbox.poll_loop.ROOM_SECONDS", 0.1)
        slow.set()
        sent += produce(ready, topic, [(f"k{each % 50}", str(each)) for each in range(2_000)])
        eventually(lambda: len(effects(ready)) == 7_000, SOON)
    assert pauses
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)


def test_a_partition_that_is_handled_slowly_leaves_room_for_the_others(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_loop, "MEMORY_LIMIT", replace(poll_loop.MEMORY_LIMIT, records=200))
    go_on = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.key_text == "slow":
            assert go_on.wait(SOON * PATIENCE)
        record_effect(connection, event)

    def send(partition: int, key: str, number: int) -> None:
        producer = Producer({"bootstrap.servers": ready.bootstrap_servers})
        for each in range(number):
            producer.produce(topic, str(each), key if key == "slow" else f"{key}{each}", partition=partition)
        assert producer.flush(30) == 0
        producer.close()

    send(0, "slow", 1_000)
    with Inbox(ready, group=group, topics=[topic], handler=handle) as inbox:
        try:
            eventually(lambda: inbox._dispatcher._queues.held >= 100, SOON)
            send(1, "fast", 500)
            eventually(lambda: len(effects(ready)) == 500, SOON)
        finally:
            go_on.set()
        eventually(lambda: len(effects(ready)) == 1_500, SOON)


def test_a_batch_of_nothing_is_refused(ready: Settings, topic: str, group: str) -> None:
    with pytest.raises(InvalidSetting, match="batch_size of at least 1"):
        Inbox(ready, group=group, topics=[topic], handler=record_effects, batch_size=0)
    assert query(ready, "SELECT count(*) FROM outbox_inbox") == [(0,)]
