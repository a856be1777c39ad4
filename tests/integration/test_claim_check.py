"""A value that is too large for Kafka, from emit through Postgres, Kafka and an object store to an inbox."""

from __future__ import annotations

import queue
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_plugin import Event, Harvester, Outbox, Settings, operate
from outbox_plugin.claim_check import ClaimCheck
from outbox_plugin.emit.cloud_events import CloudEventsMode
from outbox_plugin.inbox import Inbox, Received, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from tests.harvesting import consume, drained
from tests.inbox_support import query
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

SCAN = b"\x00%PDF" * 1_000_000


def emit(settings: Settings, *events: Event) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        Outbox().emit_many(connection, events)


def test_an_inbox_gets_the_large_value_and_the_small_one_in_their_order(
    settings: Settings, topic: str, group: str, tmp_path: Path
) -> None:
    store = ClaimCheck(f"file://{tmp_path}/values")
    arrived = queue.SimpleQueue[bytes | None]()

    def handle(_: psycopg.Connection[Any], event: Received) -> None:
        arrived.put(store.value_of(event))

    values = [b"small", SCAN, None, SCAN, b"last"]
    emit(settings, *(store.check_in(Event(topic=topic, key="17", value=value)) for value in values))
    with Harvester(settings), Inbox(settings, group=group, topics=[topic], handler=handle):
        assert [arrived.get(timeout=30 * PATIENCE) for _ in values] == values


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_an_inbox_reads_cloud_events_in_one_way_wherever_their_data_is(
    mode: CloudEventsMode, settings: Settings, topic: str, group: str, tmp_path: Path
) -> None:
    store = ClaimCheck(f"file://{tmp_path}/values", above_bytes=700_000)
    outbox = Outbox(cloud_events="/scans", cloud_events_mode=mode)
    arrived = queue.SimpleQueue[tuple[str, Any]]()

    def handle(_: psycopg.Connection[Any], event: Received) -> None:
        read = replace(event, value=store.value_of(event)).cloud_event()
        arrived.put((read.get_id(), read.get_data()))

    values = [SCAN, b"\xff" * 700_000, {"pages": 7}, {"pages": ["ä" * 500_000]}, None]
    events = [Event(topic=topic, key="17", type="Scanned", value=value) for value in values]
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        outbox.emit_many(connection, [store.check_in(event) for event in events])
    with Harvester(settings), Inbox(settings, group=group, topics=[topic], handler=handle):
        read = [arrived.get(timeout=30 * PATIENCE) for _ in values]
    data = [SCAN.decode(), *values[1:]]  # Without a type of its own, a text is read as such.
    assert read == [(str(event.idempotency_key), value) for event, value in zip(events, data, strict=True)]


def test_a_replayed_event_has_its_claim(settings: Settings, topic: str, tmp_path: Path) -> None:
    kept = settings.model_copy(update={"retention": timedelta(days=1)})
    store = ClaimCheck(f"file://{tmp_path}/values")
    emit(kept, store.check_in(Event(topic=topic, key="17", value=SCAN)))
    with Harvester(kept):
        drained(kept)
        assert operate.replay(kept) == 1
        drained(kept)
    sent = consume(kept, topic)
    assert len(sent) == 2
    for record in sent:
        headers = tuple((name, body.encode()) for name, body in record.headers)
        assert store.value_of(Received(topic, 0, 0, 0, b"17", b"", headers, "id")) == SCAN


def test_an_event_whose_value_is_gone_becomes_a_dead_letter_that_can_be_retried(
    settings: Settings, topic: str, group: str, tmp_path: Path
) -> None:
    store = ClaimCheck(f"file://{tmp_path}/values")
    query(settings, "CREATE TABLE scan (bytes INT)")

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        connection.execute("INSERT INTO scan VALUES (%s)", [len(store.value_of(event) or b"")])

    emit(settings, store.check_in(Event(topic=topic, key="17", value=SCAN)))
    [path] = [path for path in tmp_path.rglob("*") if path.is_file()]
    path.rename(tmp_path / "kept")
    letters = DeadLetters(settings)
    retry = Retry(attempts=2, first_seconds=0.05, most_seconds=0.1)
    with Harvester(settings), Inbox(settings, group=group, topics=[topic], handler=handle, retry=retry):
        eventually(lambda: len(letters.list(group)) == 1, 30)
        [letter] = letters.list(group)
        assert "the object store has no value" in letter.error
        (tmp_path / "kept").rename(path)
        letters.retry([letter.id])
        eventually(lambda: query(settings, "SELECT bytes FROM scan") == [(len(SCAN),)], 30)
