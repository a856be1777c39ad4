"""Asks Kafka every few seconds how far a group is behind, with its own client and thread.

So neither a scrape nor the handling of records waits for Kafka. An answer also shows that Kafka can be reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import OffsetSpec

from outbox_plugin.adapters.kafka_admin import END_OFFSET, FIRST_OFFSET, KafkaAdmin, offset_of, offsets_of
from outbox_plugin.adapters.kafka_clients import answer_of
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.settings import Settings

POLL_SECONDS = 5.0
ANSWER_SECONDS = 5.0
_ANSWER_POLL_SECONDS = 0.02  # How often to check whether an answer has come.
_ANY_TOPIC = "outbox"  # It need not exist, and is not made.

# By partition, the offset of the first record that is not done; None means the partition's beginning.
NextOffsets = Mapping[TopicPartition, int | None]
Lags = Mapping[TopicPartition, int]


class LagPoller:
    """Finds the lag of partitions every `POLL_SECONDS` until it is closed."""

    def __init__(
        self,
        settings: Settings,
        next_offsets: Callable[[], NextOffsets],
        found: Callable[[Lags], None],
        failed: Callable[[str], None],
    ) -> None:
        """Start polling.

        Args:
            settings: name Kafka.
            next_offsets: returns how far each partition is done.
            found: called with the lags, in offsets, when Kafka has answered.
            failed: called with the reason, in one line, if Kafka has not answered.
        """
        self._admin = KafkaAdmin(settings)
        self._next_offsets = next_offsets
        self._found = found
        self._failed = failed
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="outbox-lag", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, wait until the thread has ended, and disconnect. It does not wait for Kafka's answer."""
        self._closed.set()
        self._thread.join()
        self._admin.close()

    def _poll(self) -> None:
        while not self._closed.is_set():
            try:
                self._found(self._lags(self._next_offsets()))
            except KafkaException as error:
                self._failed(error.args[0].str())
            except TimeoutError:
                self._failed("no answer in time")
            except Exception as error:  # Go on after any error: the next poll may succeed.
                self._failed(f"unexpected: {error!r}")
            self._closed.wait(POLL_SECONDS)

    def _lags(self, next_offsets: NextOffsets) -> Lags:
        """The lag of each partition whose offsets Kafka returns.

        Raises:
            KafkaException, TimeoutError: Kafka does not answer.
        """
        if not next_offsets:
            self._check_reachable()
            return {}
        ends, firsts = (self._offsets(next_offsets, spec) for spec in (END_OFFSET, FIRST_OFFSET))
        return {
            tp: max(0, ends[tp] - max(firsts[tp], next_offset or 0))
            for tp, next_offset in next_offsets.items()
            if tp in ends and tp in firsts
        }

    def _check_reachable(self) -> None:
        """Ask about a topic, because a request about the cluster can end the process.

        librdkafka 2.16 aborts it if the answer lists no broker, as that of a broker does that was away for so long that
        it must register again.

        Raises:
            KafkaException, TimeoutError: Kafka does not answer.
        """
        topics = TopicCollection([_ANY_TOPIC])
        [answer] = self._admin.client.describe_topics(topics, request_timeout=ANSWER_SECONDS).values()
        self._wait(answer)
        try:
            answer_of(answer, 0)
        except KafkaException as error:
            if error.args[0].code() < 0:  # The library's own. A broker that refuses has answered.
                raise

    def _offsets(self, partitions: Collection[TopicPartition], spec: OffsetSpec) -> dict[TopicPartition, int]:
        asked = self._admin.ask_for_offsets((KafkaTopicPartition(*tp) for tp in partitions), spec, ANSWER_SECONDS)
        self._wait(*asked.values())
        offsets = offsets_of(asked, 0)
        if not offsets:  # Otherwise one partition's failure is its own, as where it has no leader.
            offset_of(next(iter(asked.values())), 0)  # Raises the reason.
        return {TopicPartition(at.topic, at.partition): offset for at, offset in offsets.items()}

    def _wait(self, *answers: Future[Any]) -> None:
        """Wait for all answers, unless they take too long or the poller is closed."""
        deadline = time.monotonic() + ANSWER_SECONDS + 1
        while not all(answer.done() for answer in answers) and time.monotonic() < deadline:
            if self._closed.wait(_ANSWER_POLL_SECONDS):
                return
