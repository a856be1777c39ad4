"""CloudEvents of both modes, from emit through Postgres and Kafka to an inbox."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from outbox_plugin import Event, Harvester, Outbox, Settings
from outbox_plugin.emit.cloud_events import CloudEventsMode
from outbox_plugin.emit.row_encoder import Serializer, as_bytes, as_text
from outbox_plugin.inbox import Inbox, Received
from tests.inbox_support import query
from tests.support import PATIENCE

pytestmark = pytest.mark.integration

VALUES = [{"total": 12}, "a text", b"\xff\x00", None]


@pytest.mark.parametrize(("column", "serializer"), [("TEXT", as_text), ("BYTEA", as_bytes)])
@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_an_inbox_gets_what_was_emitted(
    mode: CloudEventsMode, column: str, serializer: Serializer, settings: Settings, topic: str, group: str
) -> None:
    query(settings, f"ALTER TABLE outbox ALTER kafka_value TYPE {column} USING NULL")
    outbox = Outbox(serializer=serializer, cloud_events="/shop", cloud_events_mode=mode)
    emitted = [Event(topic=topic, key=str(number), type="Placed", value=value) for number, value in enumerate(VALUES)]
    arrived: dict[str, Any] = {}
    all_arrived = threading.Event()

    def handle(_: psycopg.Connection[Any], event: Received) -> None:
        read = event.cloud_event()
        arrived[read.get_id()] = (read.get_type(), read.get_time(), read.get_extension("partitionkey"), read.get_data())
        if len(arrived) == len(VALUES):
            all_arrived.set()

    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        outbox.emit_many(connection, emitted)
    with Harvester(settings), Inbox(settings, group=group, topics=[topic], handler=handle):
        assert all_arrived.wait(30 * PATIENCE)
    assert arrived == {
        str(event.idempotency_key): ("Placed", event.occurred_at, event.key, event.value) for event in emitted
    }
