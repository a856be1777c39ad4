"""Records whose header names are not UTF-8: nobody stops at them, and nobody takes them for another event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_clients import readable_headers
from outbox_plugin.consuming import Received, TopicRange, consume_range
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.inbox import Inbox
from outbox_plugin.inbox.dead_letters import DeadLetters
from outbox_plugin.verification.topic_reader import verify_topic
from tests.harvesting import create_topic
from tests.inbox_support import effects, make_effect_table, query, record_effect, record_effects
from tests.raw_headers import produce_raw
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

SOON = 60.0


@pytest.fixture
def topic(settings: Settings, group: str) -> str:
    """Three records of one key, of which the second has a header whose name is no text."""
    make_effect_table(settings)
    topic = create_topic(settings, f"{group}-raw", 1)
    for value, name in (("1", b"text"), ("2", b"\xff\xfename"), ("3", b"text")):
        produce_raw(settings, topic, value, name=name)
    return topic


def test_such_headers_are_noticed_however_often_they_are_read(settings: Settings, topic: str) -> None:
    """Also once the interpreter has specialised the call: then it no longer notices an error by itself."""
    for _ in range(30):
        produce_raw(settings, topic, "4")
    with closing(Consumer({"bootstrap.servers": settings.bootstrap_servers, "group.id": "test"})) as consumer:
        consumer.assign([TopicPartition(topic, 0, 0)])
        found: list[bool] = []
        deadline = time.monotonic() + SOON * PATIENCE
        while len(found) < 33 and time.monotonic() < deadline:
            found += [readable_headers(message) is None for message in consumer.consume(100, 0.2)]
    assert found == [False, True, False] + [True] * 30


@pytest.mark.parametrize("batch_size", [None, 10])
def test_an_inbox_lays_such_a_record_among_the_dead_letters_and_goes_on(
    settings: Settings, topic: str, group: str, batch_size: int | None
) -> None:
    handler: Any = record_effects if batch_size else record_effect
    place = f"{topic_state(settings, topic).topic_id}/0/1/0"  # Topic id, partition, offset, leader epoch.
    with Inbox(settings, group=group, topics=[topic], handler=handler, batch_size=batch_size) as inbox:
        eventually(lambda: len(effects(settings)) == 2, SOON)
        eventually(lambda: DeadLetters(settings).list(), SOON)
        [letter] = DeadLetters(settings).list()
        assert (letter.idempotency_key, letter.attempts) == (place, 1)
        assert "not UTF-8" in letter.error
        assert query(settings, "SELECT kafka_value, kafka_header_keys FROM outbox_inbox_dead_letter") == [(b"2", [])]
        assert effects(settings) == [("1", "k", "1"), ("3", "k", "3")]
        DeadLetters(settings).retry([letter.id])
        eventually(lambda: not DeadLetters(settings).list(), SOON)
        assert effects(settings)[2:] == [(place, "k", "2")]
        assert inbox.alive


def test_a_range_hands_it_on_without_headers_and_says_so(settings: Settings, topic: str) -> None:
    state = topic_state(settings, topic)
    found: list[Received] = []

    def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        found.extend(records)

    wanted = TopicRange("totals", topic, state.topic_id, state.first, state.end)
    assert consume_range(settings, wanted, handle).records == 3
    assert [each.unreadable_headers for each in found] == [False, True, False]
    assert [each.idempotency_key for each in found] == ["1", f"{state.topic_id}/0/1", "3"]
    assert found[1].headers == ()


def test_verification_reads_on(settings: Settings, topic: str) -> None:
    assert verify_topic(settings, topic).records == 3
