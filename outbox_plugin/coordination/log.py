"""The coordination topic: read it up to its end and on, and write to it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
)
from confluent_kafka import TopicPartition as At
from confluent_kafka.admin._listoffsets import ListOffsetsResultInfo, OffsetSpec
from confluent_kafka.cimpl import NewTopic
from pydantic import SecretStr

from outbox_plugin.adapters.kafka import (
    REACH_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    Admin,
    bounds,
    client_config,
    refusal,
    refused_property,
)
from outbox_plugin.coordination.claims import Place
from outbox_plugin.coordination.messages import (
    MalformedMessage,
    Message,
    ReleaseGroup,
    coordination_partition,
    decode,
    encode,
)
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

LOGGER = logger_of(__name__)

TOPIC = "__marshal"
PARTITIONS = 8
CATCH_UP_SECONDS = 60.0
CLOSE_SECONDS = 5.0
END: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
TOPIC_CONFIG = {
    # The broker's clock is in the log: what is late, and what is stale, is the same to all.
    "message.timestamp.type": "LogAppendTime",
    "cleanup.policy": "delete",
    "retention.ms": "86400000",
    "segment.ms": "3600000",
}


class KafkaSettings(Settings):
    """Settings of one who needs no Postgres: from keyword arguments, the environment, or `.env`."""

    dsn: SecretStr = SecretStr("")


def kafka_settings(bootstrap_servers: str | None, kafka: dict[str, str] | None) -> KafkaSettings:
    """The brokers and librdkafka properties that are given; what is None comes from the environment.

    Raises:
        InvalidSetting: in one line, what is wrong.
    """
    given: dict[str, Any] = {"bootstrap_servers": bootstrap_servers, "kafka": kafka}
    return KafkaSettings(**{name: value for name, value in given.items() if value is not None})


class Entry(NamedTuple):
    """A message in the log, and when the broker appended it (seconds since the epoch)."""

    partition: int
    offset: int
    at: float
    message: Message


class CoordinationLog:
    """One group's reader and writer of the coordination topic. `send` may be called from any thread."""

    def __init__(self, settings: KafkaSettings, topic: str, group_id: str) -> None:
        """Connect, and make the topic if it is missing.

        Raises:
            ServerRefused: no broker answers, or it does not let us in.
        """
        self._settings = settings
        self._group_id = group_id
        self.topic = topic
        self.malformed = 0
        self._ends: dict[Place, Future[ListOffsetsResultInfo]] = {}
        self._closed = False
        try:
            self._writer = Producer(  # First, as it connects while we look around.
                client_config(settings, enable_idempotence=True, linger_ms=0, message_timeout_ms=5_000)
            )
            self._reader = Consumer(
                client_config(
                    settings,
                    group_id=group_id,  # For its committed offsets; it joins nothing.
                    enable_auto_commit=False,
                    auto_offset_reset="earliest",
                    fetch_wait_max_ms=50,
                )
            )
        except KafkaException as error:
            raise refused_property(error) from None
        admin = Admin(settings)
        self._admin = admin.client
        try:
            admin.check_reachable()
            self.partitions = self._ensure_topic()
        except BaseException:
            self.close()
            raise

    def _ensure_topic(self) -> int:
        deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
        try:
            while True:
                known = self._admin.list_topics(timeout=REQUEST_TIMEOUT_SECONDS).topics.get(self.topic)
                if known is not None and known.partitions:
                    return len(known.partitions)
                if time.monotonic() > deadline:
                    raise LogUnavailable(f"Kafka: the topic {self.topic} was created, and does not appear")
                [made] = self._admin.create_topics([NewTopic(self.topic, PARTITIONS, config=TOPIC_CONFIG)]).values()
                with suppress(KafkaException):
                    made.result(REQUEST_TIMEOUT_SECONDS)
                self._raise_unless_made(made.exception())
        except KafkaException as error:
            raise refusal(error.args[0], self._settings) from None

    @staticmethod
    def _raise_unless_made(error: BaseException | None) -> None:
        if isinstance(error, KafkaException) and error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise error

    def partition_of(self, topic: str) -> int:
        """Where claims on `topic` are talked about."""
        return coordination_partition(topic, self.partitions)

    def follow(self, partitions: Collection[int], since: float) -> Iterator[Entry]:
        """Read `partitions` from the time `since` up to their present end; `read` goes on from there.

        The group's last pause, where it is older than that, comes first: the log may have forgotten it.

        Raises:
            LogUnavailable: Kafka is away.
        """
        try:
            ends = {each: self.bounds(self.topic, each)[1] for each in partitions}
            found = self._reader.offsets_for_times(
                [At(self.topic, each, int(since * 1000)) for each in partitions], REACH_SECONDS
            )
            pauses = self._reader.committed([At(self.topic, each) for each in partitions], REQUEST_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise refusal(error.args[0], self._settings) from None
        starts = {each.partition: each.offset if each.offset >= 0 else ends[each.partition] for each in found}
        self._reader.assign([At(self.topic, partition, offset) for partition, offset in starts.items()])
        for pause in pauses:
            if (entry := self._paused(pause)) is not None and entry.at < since:
                yield entry
        deadline = time.monotonic() + CATCH_UP_SECONDS
        behind = {partition for partition, offset in starts.items() if offset < ends[partition]}
        while behind:
            yield from self._read(1.0)
            behind = {partition for partition in behind if self._position(partition) < ends[partition]}
            if time.monotonic() > deadline:
                raise LogUnavailable(f"Kafka: {self.topic} could not be read up to its end in {CATCH_UP_SECONDS:.0f} s")

    def all_pauses(self) -> list[Entry]:
        """The last pause of each group that Kafka knows, for one who looks at all of them.

        Raises:
            LogUnavailable: Kafka is away.
        """
        try:
            groups = self._admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_SECONDS).result().valid or []
            partitions = [At(self.topic, each) for each in range(self.partitions)]
            wanted = [ConsumerGroupTopicPartitions(group.group_id, partitions) for group in groups]
            asked = [future for each in wanted for future in self._admin.list_consumer_group_offsets([each]).values()]
            stored = [at for future in asked for at in future.result().topic_partitions]
        except KafkaException as error:
            raise refusal(error.args[0], self._settings) from None
        return [entry for at in stored if (entry := self._paused(at)) is not None]

    def _position(self, partition: int) -> int:
        [at] = self._reader.position([At(self.topic, partition)])
        return at.offset

    @staticmethod
    def _paused(committed: At) -> Entry | None:
        with suppress(MalformedMessage):
            message = decode((committed.metadata or "").encode())
            if isinstance(message, ReleaseGroup):
                return Entry(committed.partition, -1, float(message.timestamp), message)
        return None

    def read(self, wait_seconds: float) -> list[Entry]:
        """What has come, waiting up to `wait_seconds` for the first; what is malformed is counted, and skipped.

        Raises:
            ServerRefused: we are not let in.
        """
        return list(self._read(wait_seconds))

    def _read(self, wait_seconds: float) -> Iterator[Entry]:
        found = self._reader.consume(1, wait_seconds) or []
        found += self._reader.consume(5_000, 0) if found else []
        for record in found:
            if (error := record.error()) is not None:
                if isinstance(problem := refusal(error, self._settings), LogUnavailable):
                    continue
                raise problem
            partition, offset = record.partition(), record.offset()
            try:
                message = decode(record.value())
            except MalformedMessage as malformed:
                self.malformed += 1
                LOGGER.warning("%s, partition %s, offset %s: skipped: %s", self.topic, partition, offset, malformed)
                continue
            kind, milliseconds = record.timestamp()
            at = float(message.timestamp) if kind == TIMESTAMP_NOT_AVAILABLE else milliseconds / 1000
            yield Entry(partition or 0, offset or 0, at, message)

    def send(self, message: Message, partition: int | None = None) -> None:
        """Write `message` where its topic is talked about, without waiting; one that cannot be sent in time is lost."""
        with suppress(BufferError, KafkaException):
            at = self.partition_of(message.topic) if partition is None else partition
            self._writer.produce(self.topic, encode(message), partition=at)
        self._writer.poll(0)

    def partitions_of(self, topic: str) -> int:
        """How many partitions a consumed topic has; 0 while it does not exist or Kafka does not say."""
        with suppress(KafkaException):
            return len(self._reader.list_topics(topic, REQUEST_TIMEOUT_SECONDS).topics[topic].partitions)
        return 0

    def committed(self, places: Collection[Place]) -> dict[Place, int]:
        """Where Kafka's own store, which outlives the log, says that the group goes on; the earliest where it does not.

        Raises:
            LogUnavailable: Kafka is away.
        """
        try:
            stored = self._reader.committed([At(*place) for place in places], REQUEST_TIMEOUT_SECONDS)
            return {
                place: each.offset if each.offset >= 0 else self.bounds(*place)[0]
                for place, each in zip(places, stored, strict=True)
            }
        except KafkaException as error:
            raise refusal(error.args[0], self._settings) from None

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """The offsets of a partition's first record, and of the one that comes next.

        Raises:
            LogUnavailable: Kafka is away, or there is no such partition.
        """
        try:
            return bounds(self._reader, At(topic, partition))
        except KafkaException as error:
            raise LogUnavailable(f"Kafka, {topic}, partition {partition}: {error.args[0].str()}") from None

    def ask_for_ends(self, places: Collection[Place]) -> None:
        """Ask where partitions end, without waiting."""
        with suppress(KafkaException):
            wanted = {At(*place): END for place in places}
            asked = self._admin.list_offsets(wanted, request_timeout=REQUEST_TIMEOUT_SECONDS) if wanted else {}
            self._ends.update((Place(at.topic, at.partition), answer) for at, answer in asked.items())

    def end(self, place: Place) -> int | None:
        """The partition's end, as of the last time that it was asked for; None while there is no answer."""
        answer = self._ends.get(place)
        if answer is None or not answer.done() or answer.exception() is not None:
            return None
        return answer.result().offset

    def commit(self, offsets: Mapping[Place, int], *, wait: bool = False) -> bool:
        """Keep `offsets` in Kafka's own store too, which outlives the log; whether it has them, if we `wait` for it."""
        return self._store([At(*place, offset) for place, offset in offsets.items()], wait=wait)

    def _store(self, offsets: list[At], *, wait: bool) -> bool:
        """By a client that reads nothing: a reader's own commits wait for its reading."""
        if not offsets:
            return True
        wanted = ConsumerGroupTopicPartitions(self._group_id, offsets)
        try:
            [stored] = self._admin.alter_consumer_group_offsets([wanted]).values()
            return not wait or all(each.error is None for each in stored.result(REACH_SECONDS).topic_partitions)
        except (KafkaException, TimeoutError):
            return False

    def keep_pause(self, message: ReleaseGroup) -> None:
        """Keep the group's pause, or its end, where one who reads only the log's last part finds it.

        Raises:
            LogUnavailable: Kafka did not take it.
        """
        text = encode(message).decode()
        if not self._store([At(self.topic, each, 0, text) for each in range(self.partitions)], wait=True):
            raise LogUnavailable(f"Kafka did not take what the group {self._group_id} is to do")

    def close(self) -> None:
        """Send what is to be sent, and close. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._writer.flush(CLOSE_SECONDS)
            self._writer.close()
            self._reader.close()
