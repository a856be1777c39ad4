"""A partition is cut while it is read: what the client has fetched from before the cut, and drops, is read again.

The inbox has tests of its own: test_inbox_truncated_logs.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_reader import OffsetSpan, PartitionReader, reader_config
from outbox_plugin.adapters.truncation_aware_reader import TruncatedWhileRead
from outbox_plugin.coordination import Consumer, consumer
from outbox_plugin.coordination.consumer import Guarantee
from tests.inbox_support import NOWHERE
from tests.partition_truncation import KafkaToCut, append, cut, numbered
from tests.support import eventually

pytestmark = pytest.mark.integration

SOON = 60.0


@pytest.fixture
def ready(kafka_to_cut: KafkaToCut) -> Settings:
    return NOWHERE.model_copy(update={"bootstrap_servers": kafka_to_cut.bootstrap_servers})


@pytest.fixture
def topic(kafka_to_cut: KafkaToCut) -> str:
    """A topic with one partition, and ten records."""
    name = f"events-{uuid.uuid4()}"
    admin = AdminClient({"bootstrap.servers": kafka_to_cut.bootstrap_servers})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(60)
    append(kafka_to_cut.bootstrap_servers, name, numbered("old", 0, 10))
    return name


def text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def cut_and_append(kafka_to_cut: KafkaToCut, client: Any, topic: str, end: int, more: int) -> None:
    """Cut the topic, let the client hear of it, and write to it."""
    cut(kafka_to_cut, topic, end)
    eventually(lambda: end_of(client, topic) == end, SOON)
    append(kafka_to_cut.bootstrap_servers, topic, numbered("new", end, end + more))


def end_of(client: Any, topic: str) -> int:
    """Where the topic ended when the client last fetched it."""
    _, end = client.get_watermark_offsets(TopicPartition(topic, 0), cached=True)
    return int(end)


def values_of(consumer: confluent_kafka.Consumer, topic: str, end: int) -> Iterator[str]:
    """Read the values of the topic's records up to an offset."""
    reader = PartitionReader(consumer, topic, {0: OffsetSpan(0, end)})
    return (text(each.value()) for each in chain.from_iterable(reader.batches(silence_seconds=SOON)))


@pytest.mark.parametrize(("end", "more"), [(7, 3), (7, 0), (2, 9)])
def test_a_reader_of_a_topic_returns_what_kafka_has_or_fails(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, end: int, more: int
) -> None:
    """As the one of a verification, and of a leader that reads its predecessor's progress."""
    with closing(confluent_kafka.Consumer(reader_config(ready, "test"))) as consumer:
        reading = values_of(consumer, topic, end + more)
        read = [next(reading) for _ in range(3)]
        cut_and_append(kafka_to_cut, consumer, topic, end, more)
        if end < 3:
            with pytest.raises(TruncatedWhileRead):
                list(reading)
            return
        read += reading
    assert read == [*numbered("old", 0, end), *numbered("new", end, end + more)]


def test_a_reader_reads_what_was_dropped_though_the_end_has_risen_and_fallen_between_two_polls(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str
) -> None:
    with closing(confluent_kafka.Consumer(reader_config(ready, "test"))) as consumer:
        reading = values_of(consumer, topic, 15)
        read = [next(reading) for _ in range(10)]
        append(kafka_to_cut.bootstrap_servers, topic, numbered("old", 10, 20))
        eventually(lambda: end_of(consumer, topic) == 20, SOON)
        cut_and_append(kafka_to_cut, consumer, topic, 15, 0)
        read += reading
    assert read == numbered("old", 0, 15)


def consumer_of(ready: Settings, topic: str, guarantee: Guarantee = "at-least-once") -> Consumer:
    return Consumer([topic], topic, "one", guarantee=guarantee, bootstrap_servers=ready.bootstrap_servers, kafka={})


def poll(polling: Consumer, number: int) -> list[str]:
    """Poll and commit so many records."""
    found: list[str] = []

    def has_found() -> bool:
        while len(found) < number and (message := polling.poll(0.1)) is not None:
            polling.commit(message)
            found.append(text(message.value()))
        return len(found) >= number

    eventually(has_found, SOON)
    return found


def test_a_consumer_without_rebalances_gets_what_was_fetched_and_dropped(
    ready: Settings,
    kafka_to_cut: KafkaToCut,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with consumer_of(ready, topic) as polling:
        monkeypatch.setattr(consumer, "BATCH", 1)  # It takes no more from the client, which has fetched all.
        read = poll(polling, 1)
        cut_and_append(kafka_to_cut, polling._reader, topic, 7, 3)
        read += poll(polling, 9)
        assert polling.poll(1.0) is None
    assert read == [*numbered("old", 0, 7), *numbered("new", 7, 10)]


def test_a_consumer_without_rebalances_gets_what_stands_where_it_has_consumed_other_records(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str
) -> None:
    with consumer_of(ready, topic) as polling:
        read = poll(polling, 10)
        cut(kafka_to_cut, topic, 5)
        eventually(lambda: polling.poll(0.1) is None and end_of(polling._reader, topic) == 5, SOON)
        append(ready.bootstrap_servers, topic, numbered("new", 5, 8))
        read += poll(polling, 3)
        append(ready.bootstrap_servers, topic, numbered("new", 8, 12))
        read += poll(polling, 4)
        assert polling.poll(1.0) is None
    assert read == [*numbered("old", 0, 10), *numbered("new", 5, 12)]


def test_at_least_once_what_stands_in_a_partition_that_ends_before_the_position_is_consumed(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str
) -> None:
    """The partition was cut while nobody consumed: nobody knows which of its records were consumed."""
    with consumer_of(ready, topic) as polling:
        poll(polling, 10)
    cut(kafka_to_cut, topic, 5)
    append(ready.bootstrap_servers, topic, numbered("new", 5, 8))
    with consumer_of(ready, topic) as polling:
        read = poll(polling, 8)
        append(ready.bootstrap_servers, topic, numbered("new", 8, 12))
        read += poll(polling, 4)
        assert polling.poll(1.0) is None
    assert read == [*numbered("old", 0, 5), *numbered("new", 5, 12)]


def test_at_most_once_nothing_of_a_partition_that_ends_before_the_position_is_consumed(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str
) -> None:
    with consumer_of(ready, topic, "at-most-once") as polling:
        poll(polling, 10)
    cut(kafka_to_cut, topic, 5)
    append(ready.bootstrap_servers, topic, numbered("new", 5, 8))
    with consumer_of(ready, topic, "at-most-once") as polling:

        def has_met_the_end() -> bool:
            assert polling.poll(0.1) is None
            return bool(polling._assigned) and end_of(polling._reader, topic) == 8

        eventually(has_met_the_end, SOON)
        assert polling.poll(2.0) is None
        append(ready.bootstrap_servers, topic, numbered("new", 8, 12))
        assert poll(polling, 2) == numbered("new", 10, 12)
        assert polling.poll(1.0) is None
