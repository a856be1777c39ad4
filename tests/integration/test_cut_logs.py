"""A partition is cut while it is read: what the client has fetched from before the cut, and drops, is read again.

The inbox has tests of its own: test_inbox_cut_logs.
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
from outbox_plugin.adapters.uncut_reading import CutWhileRead
from outbox_plugin.embedded.kafka import EmbeddedKafka
from tests.inbox_support import NOWHERE
from tests.partition_truncation import append, cut
from tests.processes import launched
from tests.support import eventually

pytestmark = pytest.mark.integration

SOON = 60.0


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """A broker of this module's own, which can be killed."""
    broker = EmbeddedKafka(tmp_path_factory.mktemp("cut"), print)
    with launched(broker):
        yield broker


@pytest.fixture
def ready(kafka: EmbeddedKafka) -> Settings:
    return NOWHERE.model_copy(update={"bootstrap_servers": kafka.bootstrap_servers})


@pytest.fixture
def topic(kafka: EmbeddedKafka) -> str:
    """A topic with one partition, and ten records."""
    name = f"events-{uuid.uuid4()}"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(60)
    append(kafka.bootstrap_servers, name, numbered("old", 0, 10))
    return name


def numbered(word: str, first: int, last: int) -> list[str]:
    return [f"{word} {number:02}" for number in range(first, last)]


def text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def cut_and_append(kafka: EmbeddedKafka, client: Any, topic: str, end: int, more: int) -> None:
    """Cut the topic, let the client hear of it, and write to it."""
    cut(kafka, topic, end)
    eventually(lambda: client.get_watermark_offsets(TopicPartition(topic, 0), cached=True) == (0, end), SOON)
    append(kafka.bootstrap_servers, topic, numbered("new", end, end + more))


@pytest.mark.parametrize(("end", "more"), [(7, 3), (7, 0), (2, 9)])
def test_a_reader_of_a_topic_returns_what_kafka_has_or_fails(
    ready: Settings, kafka: EmbeddedKafka, topic: str, end: int, more: int
) -> None:
    """As the one of a verification, and of a leader that reads its predecessor's progress."""
    with closing(confluent_kafka.Consumer(reader_config(ready, "test"))) as consumer:
        reader = PartitionReader(consumer, topic, {0: OffsetSpan(0, end + more)})
        reading = chain.from_iterable(reader.batches(silence_seconds=SOON))
        read = [text(next(reading).value()) for _ in range(3)]
        cut_and_append(kafka, consumer, topic, end, more)
        if end < 3:
            with pytest.raises(CutWhileRead):
                list(reading)
            return
        read += [text(each.value()) for each in reading]
    assert read == [*numbered("old", 0, end), *numbered("new", end, end + more)]
