"""Serves the metrics and the readiness of an inbox: counts its events, and notes which server answers."""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from outbox_plugin.core.readiness import NotReady, Readiness, Ready
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox.events import (
    InboxEvent,
    Observer,
    OffsetsDeletedUnread,
    RecordDeadLettered,
    RecordFailed,
    RecordsDone,
    TakenHandled,
)
from outbox_plugin.inbox.inbox_readiness import InboxFacts, is_alive, readiness
from outbox_plugin.inbox.received import Received
from outbox_plugin.observe.guard import guarded
from outbox_plugin.observe.inbox_metrics import InboxGroupMetrics, InboxMetrics
from outbox_plugin.observe.lag_poller import LagPoller, Lags, NextOffsets
from outbox_plugin.observe.telemetry_server import join, leave
from outbox_plugin.settings import Settings, host_and_port


class InboxTelemetry:
    """Serves the metrics and the readiness of an inbox at OUTBOX_LISTEN, from its start to its stop."""

    def __init__(
        self,
        settings: Settings,
        listen: str,
        group: str,
        topics: Iterable[str],
        *,
        error: Callable[[], BaseException | None],
        stopping: Callable[[], bool],
        facts: Callable[[], InboxFacts],
        next_offsets: Callable[[], NextOffsets],
        paused: Callable[[], int],
    ) -> None:
        """Open the port, or join others of this process there.

        Args:
            settings: which Kafka.
            listen: OUTBOX_LISTEN.
            group: the consumer group.
            topics: what it consumes; names that begin with ^ are patterns.
            error: what has made the inbox end by itself.
            stopping: whether it was asked to stop.
            facts: what it knows of itself, but for what is known of the servers.
            next_offsets: the first offset that is not done of each of its partitions.
            paused: how many partitions are not fetched.

        Raises:
            InvalidSetting: the address cannot be had.
        """
        self.name = f"inbox {group}"
        self._settings = settings
        self._error = error
        self._stopping = stopping
        self._facts = facts
        self._next_offsets = next_offsets
        self._paused = paused
        self._lock = threading.Lock()
        self._servers = InboxFacts()  # What is known of the servers.
        self._lags: Lags = {}
        self._poller: LagPoller | None = None
        self._port = join(*host_and_port(listen))
        try:
            self._metrics = InboxGroupMetrics(self._port.metrics_of(InboxMetrics), group)
            self._metrics.begin_at_zero(topic for topic in topics if not topic.startswith("^"))
        except BaseException:
            leave(self._port, self)
            raise
        self.observe: Observer = guarded(self._count, self.name)
        self._port.add(self)

    def _count(self, event: InboxEvent) -> None:
        match event:
            case RecordsDone():
                skipped = _by_topic(event.skipped)
                for topic, count in _by_topic(event.records).items():
                    self._metrics.handled.add(topic, count - skipped.get(topic, 0))
                for topic, count in skipped.items():
                    self._metrics.skipped.add(topic, count)
            case TakenHandled():
                self._metrics.handling.observe(event.seconds)
            case RecordFailed():
                self._metrics.retries.add(event.record.topic)
            case RecordDeadLettered():
                self._metrics.dead_lettered.add(event.record.topic)
            case OffsetsDeletedUnread():
                self._metrics.deleted_unread.add(event.topic, event.offsets)

    def poll_lag(self) -> None:
        """Ask Kafka for the lag every few seconds from now on."""
        self._poller = LagPoller(self._settings, self._next_offsets, self.kafka_answered, self.kafka_failed)

    def postgres_answered(self) -> None:
        """Note that Postgres has answered."""
        with self._lock:
            self._servers = replace(self._servers, postgres_at=time.monotonic(), postgres_error=None)

    def postgres_failed(self, error: str) -> None:
        """Note that Postgres has not answered as it should; `error` is one line."""
        with self._lock:
            self._servers = replace(self._servers, postgres_error=error)

    def kafka_answered(self, lags: Lags) -> None:
        """Note that Kafka has answered how far the group is behind."""
        with self._lock:
            self._lags = lags
            self._servers = replace(self._servers, kafka_at=time.monotonic(), kafka_error=None)

    def kafka_failed(self, error: str) -> None:
        """Note that Kafka has not answered as it should; `error` is one line."""
        with self._lock:
            self._servers = replace(self._servers, kafka_error=error)

    def is_alive(self) -> bool:
        """Whether the inbox runs; if not, the process should be restarted."""
        return is_alive(runs=self._error() is None, polled_at=self._facts().polled_at, now=time.monotonic())

    def verdicts(self) -> Mapping[str, Readiness]:
        """Whether the inbox does what it should, or why not."""
        return {self.name: self._readiness()}

    def _readiness(self) -> Readiness:
        if (error := self._error()) is not None:
            return NotReady(f"the inbox has ended: {error}")
        if self._stopping():
            return NotReady("the inbox is stopping")
        facts = self._facts()
        with self._lock:
            servers = self._servers
        known = replace(
            facts,
            postgres_at=servers.postgres_at,
            postgres_error=servers.postgres_error,
            kafka_at=servers.kafka_at,
            kafka_error=servers.kafka_error,
        )
        return readiness(known, time.monotonic())

    def show_gauges(self) -> None:
        """Set the gauges to the present state."""
        ours = self._next_offsets()
        with self._lock:
            lags: dict[TopicPartition, int] = {tp: lag for tp, lag in self._lags.items() if tp in ours}
        ready = isinstance(self._readiness(), Ready)
        self._metrics.show(lags=lags, paused=self._paused(), ready=ready)

    def close(self) -> None:
        """Show nothing any more, and close the port if nobody else uses it."""
        leave(self._port, self)
        if self._poller is not None:
            self._poller.close()


def _by_topic(records: Sequence[Received]) -> Mapping[str, int]:
    """How many records each topic has; quickest if there is one record."""
    return {records[0].topic: 1} if len(records) == 1 else Tally([record.topic for record in records])
