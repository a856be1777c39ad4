"""Coordination: how long it takes to compute who owns many partitions from the log, and the memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from outbox_plugin.coordination.heartbeat_timing import HEARTBEAT_INTERVAL_SECONDS, HeartbeatTiming
from outbox_plugin.coordination.messages import ClaimingPartition, Heartbeat, Message, decode, encode
from outbox_plugin.coordination.partition_owners import REMEMBERED_INSTANCES, Holder, World
from outbox_plugin.core.topic_partition import TopicPartition

GROUP, TOPIC = "bench", "orders"
BEGINS = 1_700_000_000.0
MEGABYTE = 2**20
RESTARTS = REMEMBERED_INSTANCES + 1


@dataclass(frozen=True)
class CoordinationReport:
    """Computing the world from a log of `messages` took `seconds`. After logs of `lengths`, it needed `megabytes`."""

    partitions: int
    instances: int
    messages: int
    seconds: float
    cpu_seconds: float
    lengths: list[int] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text."""
        return [
            f"{self.partitions:,} partitions, {self.instances:,} instances: {self.messages:,} messages in "
            f"{self.seconds:.2f} s ({self.cpu_seconds:.2f} CPU s)",
            *(
                f"in memory after {messages:9,} messages: {megabytes:.1f} MB"
                for messages, megabytes in zip(self.lengths, self.megabytes, strict=True)
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def coordination(partitions: int, instances: int) -> CoordinationReport:
    """What a new instance reads: the last part of the log, in which each holder speaks as often as it does."""
    timing = HeartbeatTiming(HEARTBEAT_INTERVAL_SECONDS)
    log = [encode(message) for _, message in _messages(partitions, instances, timing.lookback)]
    world = World(timing.interval, since=BEGINS)
    began, cpu = time.perf_counter(), time.process_time()
    for body in log:
        message = decode(body)
        world.apply(message, message.timestamp)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    now = BEGINS + timing.lookback
    for partition in range(partitions):
        assert world.owner(GROUP, TOPIC, partition, now) == _holder(partition % instances)  # noqa: S101
    lengths, megabytes = _memory(partitions, instances, timing)
    return CoordinationReport(partitions, instances, len(log), seconds, cpu_seconds, lengths, megabytes)


def _memory(partitions: int, instances: int, timing: HeartbeatTiming) -> tuple[list[int], list[float]]:
    """What the world keeps after longer and longer logs, in which all instances restart again and again."""
    tracemalloc.start()
    try:
        world = World(timing.interval)
        lengths, megabytes, applied = [], [], 0
        for run in range(3 * RESTARTS):
            for at, message in _messages(partitions, instances, timing.interval, run):
                world.apply(message, at)
                applied += 1
            if run % RESTARTS == RESTARTS - 1:
                lengths.append(applied)
                megabytes.append(tracemalloc.get_traced_memory()[0] / MEGABYTE)
        return lengths, megabytes
    finally:
        tracemalloc.stop()


def _holder(number: int, run: int = 0) -> Holder:
    return Holder(f"run-{number:05}-{run}", f"client-{number:05}")


def _messages(partitions: int, instances: int, seconds: float, run: int = 0) -> Iterator[tuple[float, Message]]:
    """A log of `seconds`: all claim, beat, and claim again in time; those of a later `run` go on with what was held."""
    timing = HeartbeatTiming(HEARTBEAT_INTERVAL_SECONDS)
    begins = BEGINS + run * seconds
    beats = round(seconds / timing.beat)
    for beat in range(beats + 1):
        at = int(begins + beat * timing.beat)
        for number in range(partitions):
            common = (1, at, *_holder(number % instances, run), GROUP, *TopicPartition(TOPIC, number))
            if beat * timing.beat % timing.renewal == 0:
                yield at, ClaimingPartition(*common)
            yield at, Heartbeat(*common, 1_000 * run * beats + beat)
