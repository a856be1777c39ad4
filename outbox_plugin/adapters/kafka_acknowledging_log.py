"""Kafka as the harvester's log in at-least-once delivery: an idempotent producer, and no transactions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from confluent_kafka import KafkaException, Producer

from outbox_plugin.adapters.kafka_clients import producer_config, refused_property, transaction_error
from outbox_plugin.adapters.record_sender import Deliveries, RecordSender, away_by_clock, refused_by_topic
from outbox_plugin.core.kafka_ports import SendResult
from outbox_plugin.core.row import OutboxRow, column
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings

DELIVERY_TIMEOUT_MS = 20_000
_PATIENCE_SECONDS = 0.5


class KafkaAcknowledgingLog:
    """`AcknowledgingLog` of `core.kafka_ports`, on one producer, which is thrown away with its term."""

    def __init__(
        self, settings: Settings, should_wait: Callable[[], bool], reserved: Callable[[str], str | None]
    ) -> None:
        """Make a producer; no connection yet.

        Args:
            settings: which Kafka.
            should_wait: returns whether waiting still makes sense; called now and then.
            reserved: returns why a topic is not for events; None where it is.

        Raises:
            InvalidSetting: OUTBOX_KAFKA holds something that librdkafka does not take.
        """
        self._should_wait = should_wait
        self._records = RecordSender(reserved, should_wait)
        config = producer_config(settings, enable_idempotence=True, message_timeout_ms=DELIVERY_TIMEOUT_MS)
        try:
            self._producer: Producer | None = Producer({**config, "on_delivery": self._records.on_delivery})
        except KafkaException as error:
            raise refused_property(error) from None

    def send(self, rows: Sequence[OutboxRow], confirm: Callable[[], None]) -> SendResult:
        """Send `rows`, in which no key of a topic occurs twice, and wait for what becomes of each.

        Args:
            rows: in their order.
            confirm: is called before anything is sent, once nothing else is waited for. What it raises is raised.

        Raises:
            LogUnavailable: Kafka does not acknowledge the rows in time.
        """
        producer = self._producer
        if producer is None:
            raise LogUnavailable("Kafka: the term's producer has been closed")
        topics = self._records.unwritable_topics(producer, rows)
        refused, away = refused_by_topic(rows, topics), dict(topics.away)
        if refused or away:
            rows = [row for row in rows if row.id not in refused and row.topic not in away]
        confirm()  # The look-up of topics may have taken long.
        sent = self._deliver(producer, rows)
        refused |= sent.refusals
        failed, off = set(sent.failed), dict(sent.off_clock)
        for row in _doubtful(rows, sent):
            alone = Deliveries()
            if row.topic not in off:
                confirm()
                alone = self._deliver(producer, [row])
                off |= alone.off_clock
            if row.topic in off or row.id not in alone.refusals:
                del refused[row.id]
                failed |= {row.id} if row.topic in off else alone.failed
        away |= {topic: away_by_clock(error) for topic, error in off.items()}
        return SendResult(set(column(rows, "id")) - refused.keys() - failed, refused, away)

    def _deliver(self, producer: Producer, rows: Sequence[OutboxRow]) -> Deliveries:
        """Send `rows` and wait. Returns what became of those that were not delivered.

        Raises:
            LogUnavailable: Kafka does not acknowledge them in time, or waiting makes no sense any more.
        """
        if not self._should_wait():
            raise LogUnavailable("Kafka: what was sent is no longer wanted")
        self._records.reset()
        try:
            self._records.produce(producer, rows)
            self._flush(producer)
        except KafkaException as error:
            raise LogUnavailable(str(transaction_error(error.args[0], "delivering", unpublished=False))) from error
        delivered = self._records.interpret_failures()
        if not delivered.failures:
            self._records.end_search()
        return delivered

    def _flush(self, producer: Producer) -> None:
        deadline = time.monotonic() + 2 * DELIVERY_TIMEOUT_MS / 1000
        while producer.flush(_PATIENCE_SECONDS) > 0:
            if time.monotonic() > deadline or not self._should_wait():
                raise LogUnavailable("Kafka does not acknowledge what was sent")

    def close(self) -> None:
        """Close the producer; what is not acknowledged may still arrive. Safe to call twice."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()  # So that closing it waits for nothing.
            producer.close()


def _doubtful(rows: Sequence[OutboxRow], sent: Deliveries) -> list[OutboxRow]:
    """The `rows` that a broker called invalid in a batch of several.

    Perhaps our clock is wrong. librdkafka reports that only for a record that was alone in its batch.
    """
    if not sent.invalid:
        return []
    records_of = Counter(column(rows, "topic"))
    return [row for row in rows if row.id in sent.invalid and records_of[row.topic] > 1]
