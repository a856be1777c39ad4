"""Counts what happens in inboxes, as Prometheus metrics.

One registry serves all inboxes of a process; the label `group` is their consumer group. Counters are updated once per
transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.observe.topic_counter import TopicCounter

# From handlers that take minutes to those under 0.1 s, whose records share a transaction.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_GROUP = ["group"]
_TOPIC = [*_GROUP, "messaging_destination_name"]
_PARTITION = [*_TOPIC, "messaging_destination_partition_id"]


class InboxMetrics:
    """The metrics of all inboxes, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str) -> Counter:
            return Counter(f"outbox_inbox_{name}", what, _TOPIC, registry=registry)

        def gauge(name: str, what: str, labels: list[str]) -> Gauge:
            return Gauge(f"outbox_inbox_{name}", what, labels, registry=registry)

        self.handled = counter("handled_messages", "Records that were handled.")
        self.skipped = counter("skipped_messages", "Records left out, as their events had been handled before.")
        self.retries = counter("retries", "Times that a record failed, and is tried again.")
        self.dead_lettered = counter("dead_lettered_messages", "Records that became dead letters.")
        self.deleted_unread = counter("deleted_unread_offsets", "Offsets that Kafka deleted before they were read.")
        self.handling = Histogram(
            "outbox_inbox_handling_duration_seconds",
            "From when a worker takes records to when it has handled them: one record, or several in one transaction.",
            _GROUP,
            buckets=_BUCKETS,
            registry=registry,
        )
        self.lag = gauge("lag_messages", "Offsets from the first that is not done to the partition's end.", _PARTITION)
        self.paused = gauge(
            "paused_partitions",
            "Partitions not fetched now: too many of their records wait, or they wait for their positions.",
            _GROUP,
        )
        self.ready = gauge("ready", "Inboxes of this process that are ready, as /readyz says.", _GROUP)

    def clear_gauges(self) -> None:
        """Clear all gauges before a scrape sets them: a partition or an inbox may be gone."""
        for each in (self.lag, self.paused, self.ready):
            each.clear()


class InboxGroupMetrics:
    """The metrics of the inboxes of one group in this process. Any thread may call it."""

    def __init__(self, metrics: InboxMetrics, group: str) -> None:
        self.handled = TopicCounter(metrics.handled, group)
        self.skipped = TopicCounter(metrics.skipped, group)
        self.retries = TopicCounter(metrics.retries, group)
        self.dead_lettered = TopicCounter(metrics.dead_lettered, group)
        self.deleted_unread = TopicCounter(metrics.deleted_unread, group)
        self.handling = metrics.handling.labels(group)
        self._all = metrics
        self._group = group

    def begin_at_zero(self, topics: Iterable[str]) -> None:
        """Show the counters of topics as 0, so that Prometheus sees the first increase."""
        for topic in topics:
            for counter in (self.handled, self.skipped, self.retries, self.dead_lettered, self.deleted_unread):
                counter.add(topic, 0)

    def show(self, *, lags: Mapping[TopicPartition, int], paused: int, ready: bool) -> None:
        """Show the state of one inbox.

        Args:
            lags: the lag of each partition that the inbox consumes, in records.
            paused: how many partitions it has paused.
            ready: whether it is ready.
        """
        for tp, lag in lags.items():
            self._all.lag.labels(self._group, *tp).set(lag)
        self._all.paused.labels(self._group).inc(paused)
        self._all.ready.labels(self._group).inc(ready)
