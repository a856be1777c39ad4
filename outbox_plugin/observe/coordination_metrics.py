"""The state of consumers that share topics through the coordination topic, as Prometheus metrics.

One registry serves all consumers of a process. All metrics are gauges, which are set at each scrape.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge

_CONSUMER = ["group", "messaging_client_id"]
_TOPIC = [*_CONSUMER, "messaging_destination_name"]


class CoordinationMetrics:
    """The metrics of all consumers, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, what: str, labels: list[str]) -> Gauge:
            return Gauge(f"outbox_coordination_{name}", what, labels, registry=registry)

        self.claimed = gauge("claimed_partitions", "Partitions that the consumer holds.", _TOPIC)
        self.unclaimed = gauge(
            "unclaimed_partitions", "Partitions that nobody in the group holds, as this consumer sees it.", _TOPIC
        )
        self.lag = gauge(
            "lag_messages", "Offsets from where another consumer would go on to the end, of claimed partitions.", _TOPIC
        )
        self.heartbeat_at = gauge(
            "heartbeat_timestamp_seconds",
            "When the last heartbeat that counted was sent, of the claimed partition whose is the oldest.",
            _CONSUMER,
        )
        self.commit_at = gauge("commit_timestamp_seconds", "When the consumer last committed a record.", _CONSUMER)
        self.poll_at = gauge("poll_timestamp_seconds", "When the consumer was last polled.", _CONSUMER)
        self.ready = gauge("ready", "1 where the consumer is ready, as /readyz says.", _CONSUMER)

    def clear_gauges(self) -> None:
        """Clear all gauges before a scrape sets them: a partition or a consumer may be gone."""
        for each in (self.claimed, self.unclaimed, self.lag, self.heartbeat_at, self.commit_at, self.poll_at):
            each.clear()
        self.ready.clear()

    def show_consumer(self, group: str, client_id: str, *, ready: bool, times: Mapping[str, float]) -> None:
        """Show the state of one consumer.

        Args:
            group: its group.
            client_id: its name in the group.
            ready: whether it is ready.
            times: when its last `heartbeat`, `commit` and `poll` were, in seconds since 1970; without those that never
                happened.
        """
        gauges = {"heartbeat": self.heartbeat_at, "commit": self.commit_at, "poll": self.poll_at}
        for name, at in times.items():
            gauges[name].labels(group, client_id).set(at)
        self.ready.labels(group, client_id).set(ready)

    def show_topic(
        self, group: str, client_id: str, topic: str, *, claimed: int, unclaimed: int, lag: int | None
    ) -> None:
        """Show how much of a topic one consumer holds, and how far it is behind.

        Args:
            group: its group.
            client_id: its name in the group.
            topic: one that it consumes.
            claimed: how many partitions it holds.
            unclaimed: how many nobody holds.
            lag: of those that it holds; None where Kafka has not told.
        """
        self.claimed.labels(group, client_id, topic).set(claimed)
        self.unclaimed.labels(group, client_id, topic).set(unclaimed)
        if lag is not None:
            self.lag.labels(group, client_id, topic).set(lag)
