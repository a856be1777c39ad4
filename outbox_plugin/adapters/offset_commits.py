"""Divides offsets among commits that a broker takes.

A broker writes a commit to its topic `__consumer_offsets` as one batch of records: one for each partition, with the
names of the group and of the topic, and the metadata. It refuses all of a commit whose batch is larger than that
topic's `max.message.bytes`, which is 1 MiB unless it is changed. A group of thousands of partitions exceeds that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from confluent_kafka import TopicPartition

MAX_COMMIT_BYTES = 400_000  # Well below 1 MiB: an operator may have set a smaller bound.
_OTHER_BYTES = 70  # Of each record: its lengths, numbers and times, and those of its key and value.


def in_commits(offsets: Iterable[TopicPartition], group: str) -> Iterator[list[TopicPartition]]:
    """Yield the offsets in their order, as many at a time as one commit may have.

    Args:
        offsets: the offsets, with their metadata.
        group: the consumer group.
    """
    group_bytes = len(group.encode())
    commit: list[TopicPartition] = []
    size = 0
    for offset in offsets:
        own = _OTHER_BYTES + group_bytes + len(offset.topic.encode()) + len((offset.metadata or "").encode())
        if commit and size + own > MAX_COMMIT_BYTES:
            yield commit
            commit, size = [], 0
        commit.append(offset)
        size += own
    if commit:
        yield commit
