"""What a topic proves about its events: how many there are, whether any came twice, whether any came out of order.

Judged as a `read_committed` consumer sees them, by the headers that the write side puts there: `idempotency-key` names
an event, `outbox-sequence` is its place within the job that `outbox-job` names (see `core.event_identity`). Records
without them are only counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import closing

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka import client_config, readable_headers, refusal
from outbox_plugin.core.event_identity import event_identity, event_source
from outbox_plugin.core.verdict import EXAMPLES, JOB_HEADER, SEQUENCE_HEADER, Verdict
from outbox_plugin.errors import LogUnavailable, ServerRefused
from outbox_plugin.settings import Settings

_BATCH = 10_000
_SEQUENCE = re.compile("[0-9]{1,18}")


class Verifier:
    """Judges records one by one, each partition's in the order of its offsets. Pure: it reads nothing itself."""

    def __init__(self, job: str | None = None) -> None:
        """With `job`, only that job's records count."""
        self.verdict = Verdict()
        self._job = job
        self._seen: set[tuple[str, str]] = set()
        self._last: dict[tuple[bytes, str], int] = {}

    def see(self, where: str, key: bytes, headers: Iterable[tuple[str, bytes | str | None]]) -> None:
        """Judge one record; `where` tells a reader where it is."""
        pairs = [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
        named = {name: _text(value) for name, value in pairs}
        job = named.get(JOB_HEADER, "")
        if self._job is not None and job != self._job:
            return
        verdict = self.verdict
        verdict.records += 1
        known = event_identity(pairs, where)
        if known.named or known.placed:
            event = (known.key, event_source("", pairs))
            if event in self._seen:
                verdict.duplicates += 1
                if len(verdict.example_duplicates) < EXAMPLES:
                    verdict.example_duplicates.append(f"{known.key} at {where}")
                return
            self._seen.add(event)
        else:
            verdict.unnamed += 1
        sequence = named.get(SEQUENCE_HEADER)
        if sequence is not None and _SEQUENCE.fullmatch(sequence):
            place = int(sequence)
            if self._last.get((key, job), -1) > place:
                verdict.order_violations += 1
                if len(verdict.example_violations) < EXAMPLES:
                    verdict.example_violations.append(f"key {key.decode(errors='replace')} at {where}")
            self._last[key, job] = place
        else:
            verdict.unplaced += 1


def verify_topic(settings: Settings, topic: str, *, job: str | None = None, timeout_seconds: float = 300.0) -> Verdict:
    """Read `topic` from its beginning to its present end, and judge it.

    Raises:
        LogUnavailable: Kafka does not answer, or the end was not reached within `timeout_seconds`.
        ServerRefused: there is no such topic, or we may not read it.
    """
    verifier = Verifier(job)
    deadline = time.monotonic() + timeout_seconds
    config = client_config(
        settings,
        group_id=f"{settings.group}-verification",  # Required by the client; nothing is committed to it.
        enable_auto_commit=False,
        isolation_level="read_committed",
    )
    # Tuning must not let it pass over records, nor keep from it where a partition ends.
    config |= {"auto.offset.reset": "earliest", "enable.partition.eof": True}
    try:
        with closing(Consumer(config)) as consumer:
            found = consumer.list_topics(topic, timeout=10).topics[topic]
            if found.error is not None:
                raise ServerRefused(f"the topic {topic} cannot be read: {found.error.str()}")
            partitions = found.partitions
            consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
            unread = set(partitions)
            while unread:
                if time.monotonic() > deadline:
                    raise LogUnavailable(f"{topic} was not read to its end within {timeout_seconds:.0f} s")
                for message in consumer.consume(_BATCH, 0.2):
                    error = message.error()
                    if error is None:
                        key = message.key() or b""
                        where = f"{topic}/{message.partition()} offset {message.offset()}"
                        headers = readable_headers(message) or []
                        verifier.see(where, key if isinstance(key, bytes) else key.encode(), headers)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        unread.discard(message.partition() or 0)
                    elif not error.retriable():
                        raise KafkaException(error)
    except KafkaException as error:
        raise refusal(error.args[0], settings) from error
    return verifier.verdict


def records_in(settings: Settings, topics: Iterable[str]) -> int:
    """How many records `topics` hold at most, by their offsets.

    Raises:
        LogUnavailable, ServerRefused: Kafka does not answer, or does not let us look.
    """
    config = client_config(settings, group_id=f"{settings.group}-verification")
    try:
        with closing(Consumer(config)) as consumer:
            bounds = [
                consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
                for topic in topics
                for partition in consumer.list_topics(topic, timeout=10).topics[topic].partitions
            ]
    except KafkaException as error:
        raise refusal(error.args[0], settings) from error
    return sum(last - first for first, last in filter(None, bounds))


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value or ""
