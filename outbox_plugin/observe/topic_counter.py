"""A counter by topic with a bounded number of series, however many topics there are."""

from __future__ import annotations

from prometheus_client import Counter

MAX_TOPICS = 200  # Per group. Records of further topics are counted together, as `OTHER_TOPICS`.
OTHER_TOPICS = "other"


class TopicCounter:
    """A counter with the labels group and topic, for one group. Any thread may call it."""

    def __init__(self, counter: Counter, group: str) -> None:
        self._counter = counter
        self._group = group
        self._topics: dict[str, Counter] = {}

    def add(self, topic: str, count: int = 1) -> None:
        """Count `count` records of a topic."""
        self._of(topic).inc(count)

    def _of(self, topic: str) -> Counter:
        if topic not in self._topics:
            if len(self._topics) >= MAX_TOPICS:
                return self._counter.labels(self._group, OTHER_TOPICS)
            self._topics[topic] = self._counter.labels(self._group, topic)
        return self._topics[topic]
