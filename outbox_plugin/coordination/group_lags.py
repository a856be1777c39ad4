"""Finds how far groups are behind, in records and in time, with a few requests for all partitions together."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from itertools import groupby
from typing import NamedTuple

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import OffsetSpec

from outbox_plugin.adapters.kafka_admin import END_OFFSET, FIRST_OFFSET, offsets_of
from outbox_plugin.adapters.kafka_clients import REQUEST_TIMEOUT_SECONDS, client_config
from outbox_plugin.coordination.log import CoordinationLog
from outbox_plugin.coordination.partition_owners import Key, Row
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.kafka_settings import KafkaSettings

READ_SECONDS = 5.0  # The time to read the first waiting records of all partitions of a group.


class Lag(NamedTuple):
    """What a group has not consumed of a partition.

    `records` counts offsets, transaction markers among them, up to what readers of committed records can see.
    `seconds` is the age of the first record that waits: 0 if none waits, None if it could not be read in time.
    """

    records: int
    seconds: float | None


def group_lags(log: CoordinationLog, settings: KafkaSettings, rows: Collection[Row]) -> dict[Key, Lag]:
    """The lag of each row's partition; those that Kafka does not know are left out.

    Args:
        log: knows where the group goes on.
        settings: which Kafka.
        rows: the partitions to look at.
    """
    partitions = {TopicPartition(row.key.topic, row.key.partition) for row in rows}
    firsts, ends = _offsets(log, partitions, FIRST_OFFSET), _offsets(log, partitions, END_OFFSET)
    starts: dict[Key, int] = {}
    found: dict[Key, Lag] = {}
    for row in rows:
        tp = TopicPartition(row.key.topic, row.key.partition)
        if tp in firsts and tp in ends:
            start = max(row.offset or 0, firsts[tp])
            found[row.key] = Lag(max(0, ends[tp] - start), 0.0)
            if start < ends[tp]:
                starts[row.key] = start
    for _, group in groupby(sorted(starts), key=lambda key: key.group_id):
        waiting = list(group)
        times = _times(settings, {TopicPartition(key.topic, key.partition): starts[key] for key in waiting})
        now = log.log_time()
        for key in waiting:
            at = times.get(TopicPartition(key.topic, key.partition))
            found[key] = found[key]._replace(seconds=None if at is None else max(0.0, now - at))
    return found


def _offsets(log: CoordinationLog, partitions: Iterable[TopicPartition], spec: OffsetSpec) -> dict[TopicPartition, int]:
    return offsets_of(log.ask_for_offsets(list(partitions), spec), REQUEST_TIMEOUT_SECONDS)


def _times(settings: KafkaSettings, starts: Mapping[TopicPartition, int]) -> dict[TopicPartition, float]:
    """When the first record at or after each offset was written (seconds since the epoch)."""
    config = client_config(
        settings,
        group_id="outbox-lag",  # The library requires it; this client joins no group and commits nothing.
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        fetch_wait_max_ms=50,
        max_partition_fetch_bytes=1_024,  # The broker still sends at least one batch.
        queued_min_messages=1,
    )
    found: dict[TopicPartition, float] = {}
    with closing(Consumer(config)) as reader:
        reader.assign([KafkaTopicPartition(*tp, offset) for tp, offset in starts.items()])
        deadline = time.monotonic() + READ_SECONDS
        while len(found) < len(starts) and time.monotonic() < deadline:
            done = []
            for record in reader.consume(1_000, 0.2):
                tp = TopicPartition(record.topic() or "", record.partition() or 0)
                if record.error() is None and tp not in found:
                    found[tp] = record.timestamp()[1] / 1000
                    done.append(KafkaTopicPartition(*tp))
            if done:
                reader.incremental_unassign(done)
    return found
