"""A partition of a Kafka topic."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A partition, by the name of its topic and its number."""

    topic: str
    partition: int


@cache
def topic_partition(topic: str, partition: int) -> TopicPartition:
    """The same object for all records of a partition: to make one takes several times as long as to look it up."""
    return TopicPartition(topic, partition)
