"""By what an inbox knows an event again: the header, its place in its job, or that in this incarnation of the topic."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient

from outbox_plugin import Settings
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.inbox import Inbox, Received, Retry
from outbox_plugin.inbox.dead_letters import DeadLetters
from tests.harvesting import create_topic
from tests.inbox_support import effects, query, record_effect, record_effects
from tests.support import eventually

pytestmark = pytest.mark.integration

SOON = 60.0
Headers = list[tuple[str, str | bytes | None]]


def send(settings: Settings, topic: str, values: Sequence[str], *headers: Headers) -> None:
    """Send records of one key, with these headers, or without any."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for value in values:
        for each in headers or ([],):
            producer.produce(topic, value, "k", headers=each)
    assert producer.flush(30) == 0
    producer.close()


def recreate(settings: Settings, topic: str) -> None:
    """Delete a topic, and create one of its name."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})

    def deleted() -> bool:
        try:
            [future] = admin.delete_topics([topic]).values()
            future.result(30)
        except KafkaException:
            return topic not in admin.list_topics(timeout=30).topics
        return False

    eventually(deleted, SOON)
    create_topic(settings, topic)


def values(settings: Settings) -> list[str]:
    return sorted(value for _, _, value in effects(settings))


def test_an_event_of_a_job_has_its_effect_once_though_it_has_no_key_of_its_own(
    ready: Settings, topic: str, group: str
) -> None:
    """As a harvester may publish it twice in at-least-once delivery."""
    jobs: list[Headers] = [[("outbox-job", job), ("outbox-sequence", number)] for job in "ab" for number in "12"]
    send(ready, topic, ["x", "x"], *jobs)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        send(ready, topic, ["end"])
        eventually(lambda: "end" in values(ready), SOON)
    assert sorted(event for event, _, value in effects(ready) if value == "x") == [
        f"job {job} {number}" for job in "ab" for number in "12"
    ]


@pytest.mark.parametrize("together", [None, 100], ids=["one by one", "batches"])
def test_an_idempotency_key_of_any_characters_is_one_event(
    ready: Settings, topic: str, group: str, together: int | None
) -> None:
    keys = ['a","b', "a,b", '"', "\\", '\\"', "{}", "{a}", "NULL", "null", " ", "a\nb", "\x1f", "%s", "é", "\U0001f600"]
    wanted: list[Headers] = [[("idempotency-key", key.encode()), ("event-type", key.encode())] for key in keys]
    send(ready, topic, ["x", "x"], *wanted)
    handler = record_effect if together is None else record_effects
    with Inbox(ready, group=group, topics=[topic], handler=handler, batch_size=together):
        send(ready, topic, ["end"])
        eventually(lambda: "end" in values(ready), SOON)
    assert sorted(event for event, _, value in effects(ready) if value == "x") == sorted(keys)
    known = query(ready, "SELECT idempotency_key, sources FROM outbox_inbox WHERE idempotency_key = ANY (%s)", keys)
    assert sorted(known) == sorted((key, [f"{topic} {key}"]) for key in keys)


@pytest.mark.parametrize("together", [None, 100], ids=["one by one", "batches"])
def test_events_with_very_long_names_are_handled_once_dead_lettered_and_tried_again(
    ready: Settings, topic: str, group: str, together: int | None
) -> None:
    """Names that differ in their last character alone, and of which Postgres' index could hold none."""
    mended = threading.Event()
    names = {value: (value * 8_999).encode() + b"12"[number : number + 1] for number, value in enumerate("gb")}
    names["B"] = names["b"][:-1] + b"3"

    def check(event: Received) -> None:
        if event.value in (b"b", b"B") and not mended.is_set():
            raise RuntimeError("bad")

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        check(event)
        record_effect(connection, event)

    def handle_batch(connection: psycopg.Connection[Any], events: list[Received]) -> None:
        for event in events:
            check(event)
        record_effects(connection, events)

    handler = handle if together is None else handle_batch
    with Inbox(ready, group=group, topics=[topic], handler=handler, batch_size=together, retry=Retry(1)):
        for value, name in names.items():
            send(ready, topic, [value, value], [("idempotency-key", name), ("event-type", name)])
        send(ready, topic, ["end"])
        eventually(lambda: values(ready) == ["end", "g"], SOON)
        eventually(lambda: len(DeadLetters(ready).list(group)) == 2, SOON)
        mended.set()
        DeadLetters(ready).retry(None, group)
        eventually(lambda: values(ready) == ["B", "b", "end", "g"], SOON)
        eventually(lambda: DeadLetters(ready).list(group) == [], SOON)
        for value, name in names.items():  # Kafka delivers them once more.
            send(ready, topic, [value], [("idempotency-key", name), ("event-type", name)])
        send(ready, topic, ["last"])
        eventually(lambda: "last" in values(ready), SOON)
    assert values(ready) == ["B", "b", "end", "g", "last"]


def test_a_topic_that_was_recreated_while_no_inbox_ran_has_new_events(ready: Settings, topic: str, group: str) -> None:
    for values_now in (["a", "b"], ["c", "d", "e"]):
        send(ready, topic, values_now)
        with Inbox(ready, group=group, topics=[topic], handler=record_effect):
            eventually(lambda values_now=values_now: {*values_now} <= {*values(ready)}, SOON)  # type: ignore[misc]
        recreate(ready, topic)
    assert values(ready) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("more", [2, 9], ids=["fewer records", "more records"])
def test_so_has_one_that_was_recreated_under_a_running_inbox(
    ready: Settings, topic: str, group: str, more: int
) -> None:
    named: list[Headers] = [[("idempotency-key", f"{number}")] for number in range(more)]
    send(ready, topic, ["a", "b", "c"])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 3, SOON)
        recreate(ready, topic)
        send(ready, topic, ["new"], *named)
        eventually(lambda: len(effects(ready)) == 3 + more, SOON)
    assert values(ready) == ["a", "b", "c", *["new"] * more]


def test_an_event_without_a_name_has_its_effect_once_also_right_after_its_topic_was_recreated(
    ready: Settings, topic: str, group: str
) -> None:
    """The inbox reads on at the old offset; what it finds there must not be taken for events of the old topic."""
    send(ready, topic, ["a", "b", "c"])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 3, SOON)
        recreate(ready, topic)
        send(ready, topic, [f"new {number}" for number in range(9)])
        eventually(lambda: {f"new {number}" for number in range(9)} <= {*values(ready)}, SOON)
        eventually(lambda: committed(ready, topic, group) == 9, SOON)
    assert values(ready) == ["a", "b", "c", *(f"new {number}" for number in range(9))]


def committed(settings: Settings, topic: str, group: str) -> int:
    """The sum of the offsets that the group has committed."""
    asked = [KafkaTopicPartition(topic, partition) for partition in range(3)]
    with closing(Consumer({"bootstrap.servers": settings.bootstrap_servers, "group.id": group})) as consumer:
        return sum(max(0, each.offset) for each in consumer.committed(asked, 20))


def numbers(first: int, count: int) -> list[Headers]:
    return [[("idempotency-key", f"{number}")] for number in range(first, first + count)]


def spread(settings: Settings, topic: str, value: str, first: int, each: int) -> None:
    """Send named events to all three partitions."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for number, headers in enumerate(numbers(first, 3 * each)):
        producer.produce(topic, value, "k", partition=number % 3, headers=headers)
    assert producer.flush(30) == 0
    producer.close()


def test_a_topic_that_was_recreated_while_partitions_move_is_read_from_its_beginning(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the partitions that do not move: here nothing but the move asks which incarnation there is."""
    spread(ready, topic, "old", 0, 3)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect) as stays:
        with Inbox(ready, group=group, topics=[topic], handler=record_effect) as leaves:
            eventually(lambda: len(effects(ready)) == 9, SOON)
            eventually(lambda: stays.partitions and leaves.partitions, SOON)
            monkeypatch.setattr(TopicIds, "recreated", lambda self, topics: set())
            recreate(ready, topic)
            spread(ready, topic, "new", 100, 6)
            eventually(lambda: values(ready).count("new") >= 9, SOON)
        eventually(lambda: values(ready).count("new") == 18, SOON)
    assert len(values(ready)) == 27


def test_an_offset_that_was_committed_in_a_topic_that_is_gone_does_not_count(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a process which ended before it noticed."""
    spread(ready, topic, "old", 0, 3)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 9, SOON)
        monkeypatch.setattr(TopicIds, "recreated", lambda self, topics: set())
        recreate(ready, topic)
        spread(ready, topic, "new", 100, 6)
        eventually(lambda: values(ready).count("new") == 9, SOON)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: values(ready).count("new") == 18, SOON)


def test_a_record_waits_until_kafka_says_the_id_of_its_topic(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the topic's name alone, it would have its effect again once the id is known."""
    silent, asked = [False], TopicIds._ask

    def ask(self: TopicIds, topics: Iterable[str]) -> dict[str, Future[Any]]:
        if not silent[0]:
            return asked(self, topics)
        futures: dict[str, Future[Any]] = {each: Future() for each in topics}
        for future in futures.values():
            future.set_exception(KafkaException("nobody answers"))
        return futures

    monkeypatch.setattr(TopicIds, "_ask", ask)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect) as inbox:
        eventually(lambda: inbox.partitions, SOON)
        silent[0] = True
        send(ready, topic, ["one", "two"])
        time.sleep(3)
        assert values(ready) == []
        silent[0] = False
        eventually(lambda: values(ready) == ["one", "two"], SOON)
    topic_id = topic_state(ready, topic).topic_id
    assert {event.rsplit("/", 3)[0] for event, _, _ in effects(ready)} == {topic_id}


@pytest.mark.parametrize("by_id", [False, True], ids=["by the topic's name", "by the topic's id"])
def test_what_a_version_before_knew_by_its_place_is_left_out(
    ready: Settings, topic: str, group: str, by_id: bool
) -> None:
    """Unless that was the place of another event: the topic was deleted meanwhile, or the partition was cut."""
    named_by = topic_state(ready, topic).topic_id if by_id else topic
    for partition in range(3):
        for offset, minutes in enumerate((1, -1)):
            query(
                ready,
                "INSERT INTO outbox_inbox (consumer_group, idempotency_key, sources, handled_at) "
                "VALUES (%s, %s, %s, now() + make_interval(mins => %s))",
                *(group, f"{named_by}/{partition}/{offset}", [topic], minutes),
            )
    send(ready, topic, ["known", "new"])
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: values(ready) == ["new"], SOON)
