"""A counter by topic whose number of series is bounded, however many topics there are."""

from __future__ import annotations

from prometheus_client import Counter

MAX_TOPICS = 200  # Of a group; records of further topics are counted together, as `OTHER_TOPICS`.
OTHER_TOPICS = "other"


class TopicCounter:
    """One group's part of a counter whose labels are the group and the topic. Any thread may call it."""

    def __init__(self, counter: Counter, group: str) -> None:
        self._counter = counter
        self._group = group
        self._topics: dict[str, Counter] = {}

    def add(self, topic: str, count: int = 1) -> None:
        """Count so many records of a topic."""
        self._of(topic).inc(count)

    def _of(self, topic: str) -> Counter:
        if topic not in self._topics:
            if len(self._topics) >= MAX_TOPICS:
                return self._counter.labels(self._group, OTHER_TOPICS)
            self._topics[topic] = self._counter.labels(self._group, topic)
        return self._topics[topic]
