"""Reads the progress topic, for a new leader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_plugin.adapters.kafka_clients import REQUEST_TIMEOUT_SECONDS, UNKNOWN_TOPIC, connection_error, content
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.kafka_reader import (
    NotReadToEnd,
    OffsetSpan,
    PartitionReader,
    bounds,
    find_leaders,
    reader_config,
)
from outbox_plugin.adapters.topic_metadata import look_up_topic
from outbox_plugin.core.last_progress import LastProgress, LastRecordFinder, LogRecord
from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Signer, Slot
from outbox_plugin.errors import LogUnavailable, ServerRefused, TopicMissing
from outbox_plugin.settings import Settings

_TAIL_RECORDS = 32  # How far from its end the progress topic is read at first; markers take offsets too.
# How long Kafka waits for records at the end before it says that none are there. A read meets the end three times.
_END_WAIT_MILLISECONDS = 2


class ProgressReader:
    """Reads the last progress records of slices, one after the other. Fences nobody."""

    def __init__(
        self,
        settings: Settings,
        names: KafkaNames,
        signer: Signer,
        should_wait: Callable[[], bool] = lambda: True,
    ) -> None:
        """Connect.

        Args:
            settings: which Kafka.
            names: what the group calls its topics.
            signer: has the secret of the outbox.
            should_wait: returns whether waiting for Kafka still makes sense; called now and then.

        Raises:
            LogUnavailable: there is no token for Kafka.
        """
        self._settings = settings
        self._topic = names.progress_topic
        self._signer = signer
        self._should_wait = should_wait
        with ExitStack() as opened, self._errors_explained():
            self._uncommitted = opened.enter_context(closing(_consumer(settings, names, "read_uncommitted")))
            self._committed = opened.enter_context(closing(_consumer(settings, names, "read_committed")))
            for consumer in (self._uncommitted, self._committed):
                find_leaders(consumer, self._topic)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self._opened.close()

    def read(self, slice_: Slice, *, to_the_end: bool = False, accepts_unsigned: bool = False) -> LastProgress:
        """Read a slice's last progress record.

        Args:
            slice_: the record of this one.
            to_the_end: whether to read up to the end that the partition had when the read began. Otherwise the read may
                end earlier, where an open transaction begins or where a replica lags. A later record then counts as
                uncommitted.
            accepts_unsigned: the slice's last leader may have been of a version that did not sign.

        Raises:
            TopicMissing: the brokers do not know the topic, or it lacks the slice's partition.
            LogUnavailable: Kafka does not answer in time, or does not give all of it, or no broker leads the partition.
            ServerRefused: we may not read the topic.
            MalformedProgress: a harvester of a later version has written what is there.
        """
        slot = Slot("progress", self._topic, slice_.number)
        finder = LastRecordFinder(self._signer, slot, slice_.name.encode(), accepts_unsigned)
        with self._errors_explained(slice_.number):
            return self._find(finder, slice_.number, to_the_end=to_the_end)

    @contextmanager
    def _errors_explained(self, partition: int = 0) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            if error.args[0].code() in UNKNOWN_TOPIC:
                raise self._unknown_partition_error(partition) from error
            raise connection_error(error.args[0], self._settings) from error

    def _unknown_partition_error(self, partition: int) -> TopicMissing | LogUnavailable | ServerRefused:
        """What it means that the client does not know a partition. It knows none without a leader, either."""
        try:
            metadata = look_up_topic(self._uncommitted, self._topic, self._should_wait)
        except KafkaException as error:
            return connection_error(error.args[0], self._settings)
        if metadata is not None and metadata.error is not None and metadata.error.code() not in UNKNOWN_TOPIC:
            return connection_error(metadata.error, self._settings)
        found = None if metadata is None else metadata.partitions.get(partition)
        if found is None:
            return TopicMissing(f"Kafka: the topic {self._topic} is gone")
        if found.leader < 0:
            return LogUnavailable(f"Kafka: no broker leads partition {partition} of the topic {self._topic} now")
        return LogUnavailable(f"Kafka: partition {partition} of the topic {self._topic} had no leader until now")

    def _find(self, finder: LastRecordFinder, partition: int, *, to_the_end: bool) -> LastProgress:
        # The consumer of committed records would return the begin of an open transaction as the end.
        first, end = bounds(self._uncommitted, TopicPartition(self._topic, partition), should_wait=self._should_wait)
        tail_records = _TAIL_RECORDS
        while True:
            start = max(first, end - tail_records)
            # Read first, so that a record that is committed meanwhile counts as uncommitted.
            span = OffsetSpan(start, end, least_end=end if to_the_end else start)
            kept = {record.offset for record in self._records(self._committed, partition, span, finder.key)}
            seen = [
                record._replace(is_committed=record.offset in kept)
                for record in self._records(self._uncommitted, partition, OffsetSpan(start, end), finder.key)
            ]
            if (found := finder.conclude(seen, start, first, end)) is not None:
                return found
            tail_records *= 8

    def _records(self, consumer: Consumer, partition: int, span: OffsetSpan, key: bytes) -> list[LogRecord]:
        """The records of `key` in `span`.

        Raises:
            LogUnavailable: the consumer does not get all of them.
            KafkaException: an error that does not pass by itself.
        """
        found = []
        reader = PartitionReader(consumer, self._topic, {partition: span})
        try:
            for batch in reader.batches(silence_seconds=REQUEST_TIMEOUT_SECONDS):
                if not self._should_wait():
                    raise LogUnavailable(f"Kafka: {self._topic} had not been read to its end when the term had to end")
                for message in batch:
                    its_key, value, headers = content(message)
                    if its_key == key:
                        found.append(LogRecord(message.offset() or 0, False, value, headers))
        except NotReadToEnd as error:
            raise LogUnavailable(
                f"{error}: nothing more came for {REQUEST_TIMEOUT_SECONDS:.0f} s; an open transaction of another "
                "producer there holds it up"
            ) from None
        return found


def _consumer(settings: Settings, names: KafkaNames, isolation_level: str) -> Consumer:
    required = {"isolation_level": isolation_level, "fetch_wait_max_ms": _END_WAIT_MILLISECONDS}
    return Consumer(reader_config(settings, names.leader_group, **required))
