"""Finds the offsets up to which a topic is verified: all records that are committed when the verification starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress

from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka_clients import REQUEST_TIMEOUT_SECONDS, client_config
from outbox_plugin.adapters.kafka_reader import OffsetSpan, bounds, find_leaders
from outbox_plugin.errors import LogUnavailable, ServerRefused
from outbox_plugin.settings import Settings

COMMIT_SECONDS = 10.0  # A transaction that stays open for longer counts as not committed.
LIST_SECONDS = 10.0
WAIT_SECONDS = COMMIT_SECONDS + LIST_SECONDS  # For the commits to all topics together.
_POLL_SECONDS = 0.05


def committed_spans(settings: Settings, topic: str, deadline: float = math.inf) -> dict[int, OffsetSpan]:
    """The span of offsets of each partition that contains all records committed by now.

    Kafka confirms a commit before all partitions show its records to `read_committed` consumers. So this fetches the
    end offsets that include uncommitted records, and waits until the committed ends have reached them.

    Args:
        settings: name Kafka.
        topic: its name.
        deadline: in seconds of `time.monotonic()`, when Kafka must have answered. A transaction that is still open then
            counts as not committed. Each request also has its own time limit.

    Raises:
        KafkaException: Kafka does not answer, or does not allow us to read.
        ServerRefused: there is no such topic.
    """
    with ExitStack() as stack:
        committed, uncommitted = (
            stack.enter_context(closing(Consumer(_config(settings, isolation_level))))
            for isolation_level in ("read_committed", "read_uncommitted")
        )
        listed = uncommitted.list_topics(topic, timeout=_until(deadline, LIST_SECONDS)).topics[topic]
        if listed.error is not None:
            raise ServerRefused(f"the topic {topic} cannot be read: {listed.error.str()}")
        find_leaders(committed, topic)
        spans = _bounds(uncommitted, topic, listed.partitions, deadline)
        ends = reached_ends(
            {number: end for number, (_, end) in spans.items()},
            lambda: {number: end for number, (_, end) in _bounds(committed, topic, spans, deadline).items()},
            deadline,
        )
    return {number: OffsetSpan(min(start, ends[number]), ends[number]) for number, (start, _) in spans.items()}


def reached_ends(
    ends: Mapping[int, int], committed_ends: Callable[[], Mapping[int, int]], deadline: float = math.inf
) -> dict[int, int]:
    """Wait until the committed ends have reached `ends`, for `COMMIT_SECONDS` at most.

    Args:
        ends: the end of each partition, with uncommitted records.
        committed_ends: asks Kafka for the ends of the committed records.
        deadline: in seconds of `time.monotonic()`, to end the wait earlier.

    Returns:
        `ends`; for a partition in which a transaction stays open, the offset at which that transaction begins.
    """
    deadline = min(deadline, time.monotonic() + COMMIT_SECONDS)
    while True:
        committed = committed_ends()
        if all(committed[number] >= end for number, end in ends.items()) or time.monotonic() > deadline:
            return {number: min(end, committed[number]) for number, end in ends.items()}
        time.sleep(_POLL_SECONDS)


def wait_for_commits(settings: Settings, topics: Sequence[str]) -> None:
    """Wait until a `read_committed` consumer can see all records that have been committed to `topics`.

    Returns after about `WAIT_SECONDS` at the latest, however many topics there are. If this process cannot reach Kafka,
    as with a remote Spark, it does not wait.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    for topic in dict.fromkeys(topics):
        if time.monotonic() >= deadline:
            return
        with suppress(KafkaException, LogUnavailable, ServerRefused):
            committed_spans(settings, topic, deadline)


def _config(settings: Settings, isolation_level: str) -> dict[str, object]:
    group_id = f"{settings.group}-verification"  # The client requires one; no offsets are committed.
    return client_config(settings, group_id=group_id, enable_auto_commit=False, isolation_level=isolation_level)


def _bounds(consumer: Consumer, topic: str, partitions: Iterable[int], deadline: float) -> dict[int, tuple[int, int]]:
    return {
        number: bounds(consumer, TopicPartition(topic, number), _until(deadline, REQUEST_TIMEOUT_SECONDS))
        for number in partitions
    }


def _until(deadline: float, longest_seconds: float) -> float:
    """The time-out of a request: the time left until `deadline`, but at most `longest_seconds`."""
    return max(0.1, min(longest_seconds, deadline - time.monotonic()))
