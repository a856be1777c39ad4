"""Kafka deletes records that an inbox has not read: it says so, and counts them. Other gaps raise no alarm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest
from confluent_kafka import OFFSET_END, Consumer, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient

from outbox_plugin import Settings
from outbox_plugin.core.memory_limit import MemoryLimit
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import Inbox, Received, poll_loop
from tests.harvesting import create_topic
from tests.inbox_support import effects, produce, record_effect
from tests.integration.test_inbox_identity import recreate
from tests.partition_truncation import append
from tests.scraping import listening, metrics
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

SOON = 60.0
ALARM = "were deleted before this group read them"


@pytest.fixture
def topic(ready: Settings, group: str) -> str:
    """A topic with one partition."""
    return create_topic(ready, f"{group}-events", 1)


def send(settings: Settings, topic: str, first: int, last: int) -> None:
    produce(settings, topic, [("key", f"{number:02}") for number in range(first, last)])


def delete(settings: Settings, topic: str, before: int) -> None:
    """Delete the records below an offset, as retention does."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    for deleted in admin.delete_records([KafkaTopicPartition(topic, 0, before)]).values():
        deleted.result(SOON)


def values(settings: Settings) -> list[int]:
    return [int(value) for _, _, value in effects(settings)]


def consume(settings: Settings, topic: str, group: str, expected: list[int]) -> None:
    """Run an inbox until these effects are there, and no others."""
    with Inbox(settings, group=group, topics=[topic], handler=record_effect) as inbox:
        eventually(lambda: len(effects(settings)) >= len(expected) or not inbox.alive, SOON)
        eventually(lambda: has_passed(inbox, topic, end(settings, topic)), SOON)
    assert sorted(values(settings)) == expected


def has_passed(inbox: Inbox, topic: str, end: int) -> bool:
    """Whether the inbox knows that it has read everything before an offset."""
    assert inbox._loop is not None
    unread = inbox._loop._unread
    return unread._next.get(TopicPartition(topic, 0)) == end


def end(settings: Settings, topic: str) -> int:
    """The offset at which the partition ends."""
    with closing(Consumer({"bootstrap.servers": settings.bootstrap_servers, "group.id": "-"})) as consumer:
        return consumer.get_watermark_offsets(KafkaTopicPartition(topic, 0), SOON)[1]


def deleted_unread(settings: Settings, topic: str, group: str) -> float | None:
    return metrics(settings, group).get(("outbox_inbox_deleted_unread_offsets_total", topic))


def test_an_inbox_that_was_stopped_says_what_was_deleted_meanwhile(
    ready: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    ready = listening(ready)
    send(ready, topic, 0, 10)
    consume(ready, topic, group, [*range(10)])
    send(ready, topic, 10, 20)
    delete(ready, topic, 17)
    assert ALARM not in caplog.text
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: deleted_unread(ready, topic, group) == 7, SOON)
        eventually(lambda: len(effects(ready)) == 13, SOON)
    assert values(ready) == [*range(10), *range(17, 20)]
    said = f"{topic} [0]: 7 offsets {ALARM}: it was at 10, and the partition begins at 17."
    assert [each.levelname for each in caplog.records if said in each.getMessage()] == ["WARNING"]
    consume(ready, topic, group, values(ready))
    assert caplog.text.count(ALARM) == 1


def test_an_inbox_says_so_where_nothing_is_left(
    ready: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(ready, topic, 0, 10)
    consume(ready, topic, group, [*range(10)])
    send(ready, topic, 10, 20)
    delete(ready, topic, OFFSET_END)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: f"10 offsets {ALARM}: it was at 10, and the partition begins at 20" in caplog.text, SOON)


def test_an_inbox_that_is_too_slow_says_what_it_has_missed(
    ready: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has paused the partition, because its handlers have enough to do."""
    monkeypatch.setattr(poll_loop, "MEMORY_LIMIT", MemoryLimit(records=4, size=1_000_000))
    monkeypatch.setattr(poll_loop, "ROOM_SECONDS", 0.0)
    opened = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        assert opened.wait(60 * PATIENCE)
        record_effect(connection, event)

    with Inbox(ready, group=group, topics=[topic], handler=handle) as inbox:
        try:
            send(ready, topic, 0, 20)
            eventually(lambda: inbox._pauses.count == 1, SOON)
            delete(ready, topic, 15)
        finally:
            opened.set()
        eventually(lambda: 19 in values(ready), SOON)
    handled = values(ready)
    missed = [number for number in range(20) if number not in handled]
    assert missed == [*range(missed[0], 15)]
    assert f"{len(missed)} offsets {ALARM}: it was at {missed[0]}, and the partition begins at 15" in caplog.text
    assert caplog.text.count(ALARM) == 1


def transactions(settings: Settings, topic: str, end_each: Callable[[Producer], object]) -> None:
    """Have two transactions end after each other, so that two markers stand at the end of the partition."""
    with ExitStack() as opened:
        producers = []
        for number in range(2):
            config = {"bootstrap.servers": settings.bootstrap_servers, "transactional.id": f"{topic}-{number}"}
            producer = opened.enter_context(closing(Producer(config)))
            producer.init_transactions()
            producer.begin_transaction()
            producer.produce(topic, f"{number}", "key", 0, headers=[("idempotency-key", f"{topic}-{number}".encode())])
            assert producer.flush(SOON) == 0
            producers.append(producer)
        for producer in producers:
            end_each(producer)


@pytest.mark.parametrize("end_each", [Producer.commit_transaction, Producer.abort_transaction])
def test_what_takes_offsets_and_is_no_record_raises_no_alarm(
    ready: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture, end_each: Callable[[Producer], object]
) -> None:
    """Retention deletes the markers at the end of the partition, which the running inbox has passed."""
    with Inbox(ready, group=group, topics=[topic], handler=record_effect) as inbox:
        transactions(ready, topic, end_each)
        send(ready, topic, 2, 3)
        transactions(ready, topic, end_each)
        eventually(lambda: 2 in values(ready), SOON)
        eventually(lambda: has_passed(inbox, topic, 9), SOON)
        delete(ready, topic, OFFSET_END)
        send(ready, topic, 3, 4)
        eventually(lambda: 3 in values(ready), SOON)
    assert ALARM not in caplog.text


def test_a_marker_that_was_deleted_raises_no_alarm_at_the_next_start(
    ready: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The group's position is before it, because no record follows."""
    config = {"bootstrap.servers": ready.bootstrap_servers, "transactional.id": topic}
    with closing(Producer(config)) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        for number in range(5):
            producer.produce(topic, f"{number}", "key", 0)
        producer.commit_transaction()
    consume(ready, topic, group, [*range(5)])
    delete(ready, topic, OFFSET_END)
    consume(ready, topic, group, [*range(5)])
    send(ready, topic, 5, 6)
    consume(ready, topic, group, [*range(6)])
    assert ALARM not in caplog.text


def test_what_was_deleted_before_a_group_first_reads_raises_no_alarm(
    ready: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(ready, topic, 0, 10)
    delete(ready, topic, 6)
    consume(ready, topic, group, [*range(6, 10)])
    assert ALARM not in caplog.text


@pytest.mark.parametrize("runs", [True, False])
def test_a_topic_that_was_recreated_raises_no_alarm(
    ready: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture, runs: bool
) -> None:
    """A running inbox may handle records behind its old position before it notices and reads the others."""
    send(ready, topic, 0, 5)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect) as inbox:
        eventually(lambda: len(effects(ready)) == 5, SOON)
        if not runs:
            inbox.stop()
        recreate(ready, topic)
        append(ready.bootstrap_servers, topic, [f"{number:02}" for number in range(5, 15)])
        delete(ready, topic, 3)
        if runs:
            eventually(lambda: {*range(8, 15)} <= {*values(ready)}, SOON)
        assert runs or values(ready) == [*range(5)]  # It has stopped before.
    consume(ready, topic, group, sorted(values(ready)) if runs else [*range(5), *range(8, 15)])
    assert ALARM not in caplog.text
