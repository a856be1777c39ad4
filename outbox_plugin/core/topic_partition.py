"""A partition of a Kafka topic."""

from __future__ import annotations

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A partition, by the name of its topic and its number."""

    topic: str
    partition: int
