"""Serves the metrics and the readiness of a consumer: what it holds, its lag, and whether Kafka answers."""

from __future__ import annotations

import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence

from outbox_plugin.coordination.consumer_readiness import ConsumerFacts, is_alive, readiness
from outbox_plugin.core.readiness import NotReady, Readiness, Ready
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.observe.coordination_metrics import CoordinationMetrics
from outbox_plugin.observe.lag_poller import LagPoller, Lags
from outbox_plugin.observe.telemetry_server import join, leave
from outbox_plugin.settings import Settings, host_and_port


class ConsumerTelemetry:
    """Serves the metrics and the readiness of a consumer at OUTBOX_LISTEN, from its start to its close."""

    def __init__(
        self,
        settings: Settings,
        listen: str,
        group_id: str,
        client_id: str,
        topics: Sequence[str],
        *,
        error: Callable[[], BaseException | None],
        facts: Callable[[], ConsumerFacts],
        unclaimed: Callable[[], Sequence[TopicPartition]],
        committed_at: Callable[[], float | None],
    ) -> None:
        """Open the port, or join others of this process there.

        Args:
            settings: which Kafka.
            listen: OUTBOX_LISTEN.
            group_id: the group.
            client_id: the consumer's name in it.
            topics: what it consumes.
            error: why it can no longer follow the coordination topic.
            facts: what its instance knows.
            unclaimed: which of the group's partitions nobody holds.
            committed_at: when it last committed a record, in seconds since 1970.

        Raises:
            InvalidSetting: the address cannot be had.
        """
        self.name = f"consumer {client_id} of {group_id}"
        self._settings = settings
        self._group = group_id
        self._client = client_id
        self._topics = topics
        self._error = error
        self._facts = facts
        self._unclaimed = unclaimed
        self._committed_at = committed_at
        self._lock = threading.Lock()
        self._lags: Lags = {}
        self._kafka_at: float | None = None
        self._kafka_error: str | None = None
        self._poller: LagPoller | None = None
        self._port = join(*host_and_port(listen))
        try:
            self._metrics = self._port.metrics_of(CoordinationMetrics)
        except BaseException:
            leave(self._port, self)
            raise
        self._port.add(self)

    def poll_lag(self) -> None:
        """Ask Kafka for the lag every few seconds from now on."""
        self._poller = LagPoller(
            self._settings, lambda: self._facts().offsets, self._kafka_answered, self._kafka_failed
        )

    def _kafka_answered(self, lags: Lags) -> None:
        with self._lock:
            self._lags, self._kafka_at, self._kafka_error = lags, time.monotonic(), None

    def _kafka_failed(self, error: str) -> None:
        with self._lock:
            self._kafka_error = error

    def is_alive(self) -> bool:
        """Whether the consumer follows the coordination topic; if not, the process should be restarted."""
        return is_alive(runs=self._error() is None, followed_at=self._facts().followed_at, now=time.monotonic())

    def verdicts(self) -> Mapping[str, Readiness]:
        """Whether the consumer does what it should, or why not."""
        return {self.name: self._readiness(self._facts())}

    def _readiness(self, facts: ConsumerFacts) -> Readiness:
        if (error := self._error()) is not None:
            return NotReady(f"the coordination topic is not followed any more: {error}")
        with self._lock:
            kafka_at, kafka_error = self._kafka_at, self._kafka_error
        return readiness(facts, kafka_at, kafka_error, time.monotonic())

    def show_gauges(self) -> None:
        """Set the gauges to the present state."""
        facts = self._facts()
        with self._lock:
            lags = {tp: lag for tp, lag in self._lags.items() if tp in facts.offsets}
        unclaimed = Tally(tp.topic for tp in self._unclaimed())
        for topic in self._topics:
            held = [tp for tp in facts.offsets if tp.topic == topic]
            known = [lags[tp] for tp in held if tp in lags]
            lag = sum(known) if len(known) == len(held) else None
            self._metrics.show_topic(
                self._group, self._client, topic, claimed=len(held), unclaimed=unclaimed[topic], lag=lag
            )
        since_1970 = time.time() - time.monotonic()
        times = {
            "heartbeat": facts.confirmed_at and facts.confirmed_at + since_1970,
            "poll": facts.polled_at and facts.polled_at + since_1970,
            "commit": self._committed_at(),
        }
        ready = isinstance(self._readiness(facts), Ready)
        shown = {name: at for name, at in times.items() if at is not None}
        self._metrics.show_consumer(self._group, self._client, ready=ready, times=shown)

    def close(self) -> None:
        """Show nothing any more, and close the port if nobody else uses it."""
        leave(self._port, self)
        if self._poller is not None:
            self._poller.close()
