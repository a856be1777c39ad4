"""A `read_committed` consumer of one topic, which records when each record arrived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox_plugin.adapters.kafka_clients import client_config
from outbox_plugin.bench.judge import ReadRecord
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings

_TOPIC_SECONDS = 20.0


class Arrival(NamedTuple):
    """A record, and when it came, in seconds of this process's monotonic clock."""

    at: float
    record: ReadRecord


def read_until(
    settings: Settings, topic: str, enough: Callable[[Sequence[ReadRecord]], bool], seconds: float
) -> list[ReadRecord]:
    """Read a topic from its beginning to its end, and on until there is `enough`.

    Args:
        settings: how to reach Kafka.
        topic: what is read.
        enough: whether the records read so far are all that is expected.
        seconds: after which reading ends in any case. A transaction's records may be seen a little after its commit was
            acknowledged.
    """
    deadline = time.monotonic() + seconds
    records: list[ReadRecord] = []
    with closing(_consumer(settings, topic)) as consumer:
        unread = {each.partition for each in consumer.assignment()}
        while time.monotonic() < deadline:
            messages = consumer.consume(10_000, 0.2)
            for message in messages:
                if _is_end(message):
                    unread.discard(message.partition() or 0)
                elif (record := _seen(message)) is not None:
                    records.append(record)
            if not unread and enough(records):
                break
    return records


class LiveReader:
    """Reads what comes, on a thread of its own."""

    def __init__(self, settings: Settings, topic: str) -> None:
        """Nothing is read yet."""
        self._settings = settings
        self._topic = topic
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="bench-reader")
        self.arrivals: list[Arrival] = []  # Is only ever appended to.

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read for as long as the body runs.

        Raises:
            KafkaException: the topic cannot be read.
        """
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def wait_for(self, condition: Callable[[Sequence[Arrival]], bool], seconds: float) -> bool:
        """Wait until what has come fulfils `condition`; False if it did not within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.arrivals) or self._error is not None, seconds)

    def _read(self) -> None:
        try:
            with closing(_consumer(self._settings, self._topic)) as consumer:
                while not self._stop.is_set():
                    first = consumer.poll(0.2)
                    now = time.monotonic()
                    messages = [first, *consumer.consume(1_000, 0)] if first is not None else []
                    came = [Arrival(now, record) for each in messages if (record := _seen(each)) is not None]
                    if came:
                        with self._changed:
                            self.arrivals.extend(came)
                            self._changed.notify_all()
        except BaseException as error:
            self._error = error
            with self._changed:
                self._changed.notify_all()


def _consumer(settings: Settings, topic: str) -> Consumer:
    config = client_config(
        settings,
        group_id=f"{settings.group}-reader",  # Required by the client; nothing is committed to it.
        enable_auto_commit=False,
        enable_partition_eof=True,
        isolation_level="read_committed",
        auto_offset_reset="error",  # Restarting from the beginning would look like duplicates.
    )
    consumer = Consumer(config)
    deadline = time.monotonic() + _TOPIC_SECONDS
    while not (partitions := consumer.list_topics(topic, timeout=_TOPIC_SECONDS).topics[topic].partitions):
        if time.monotonic() > deadline:
            raise LogUnavailable(f"Kafka: there is no topic {topic}")
        time.sleep(0.05)  # Another broker than the one that made it may not know it yet.
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    return consumer


def _seen(message: Message) -> ReadRecord | None:
    error = message.error()
    if error is None:
        return ReadRecord(message.partition() or 0, message.offset() or 0, _text(message.key()), _text(message.value()))
    if error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
        raise KafkaException(error)
    return None


def _is_end(message: Message) -> bool:
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def _text(body: str | bytes | None) -> str:
    return body.decode() if isinstance(body, bytes) else body or ""
