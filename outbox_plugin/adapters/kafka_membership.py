"""The leader topic: which of its partitions this harvester owns, and the heartbeats on it.

One consumer is a member of the leader group, and only owns partitions. Another reads every partition, so that a
follower hears the leader too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from outbox_plugin.adapters.kafka_clients import (
    FORBIDDEN_TOPIC,
    UNKNOWN_TOPIC,
    connection_error,
    content,
    internal_client_config,
    is_fatal,
    refused_property,
)
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.leader_topic_tail import LeaderTopicTail
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.core.heartbeat_codec import HeartbeatCodec, LeaderRecord
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat, is_goharvests
from outbox_plugin.core.signing import Signer
from outbox_plugin.errors import LogUnavailable, TopicMissing
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.harvester")

_CHECK_SECONDS = 0.5
RECEIVE_SECONDS = 0.5  # How long records are received in one go. Some may come faster than they can be verified.
SESSION_TIMEOUT_MS = 6_000  # Brokers allow no less by default.


class _HeartbeatErrorLog:
    """Logs why Kafka refuses heartbeats. The status cannot: it reads those heartbeats.

    Each reason is logged once, until no partition refuses them any more.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._refusing: set[int | None] = set()
        self._logged: set[str] = set()

    def note(self, error: KafkaError | None, message: Message) -> None:
        """Take in a refusal; None says that a heartbeat went through."""
        partition = message.partition()
        if error is None:
            self._refusing.discard(partition)
            if not self._refusing:
                self._logged.clear()
            return
        self._refusing.add(partition)
        if (reason := error.str()) not in self._logged:
            self._logged.add(reason)
            logger.warning(
                "heartbeats %s (partition %s), and a harvester cannot lead without them: %s",
                self._what,
                partition,
                reason,
            )

    def on_delivery(self, error: KafkaError | None, message: Message) -> None:
        """Take in what became of a heartbeat. The client's own errors mean an outage."""
        if error is None or (error.code() > 0 and error.code() not in UNKNOWN_TOPIC):
            self.note(error, message)


class KafkaMembership:
    """`Membership` on two consumers and a producer. Only `send` may be called by two threads at once."""

    def __init__(self, settings: Settings, names: KafkaNames, shards: int, signer: Signer, instance: str) -> None:
        """Connect.

        Args:
            settings: which Kafka.
            names: what the group calls its topics.
            shards: how many there are.
            signer: signs what is sent, and verifies what is heard.
            instance: the name under which this harvester sends heartbeats; no other one ever does.

        Raises:
            InvalidSetting: OUTBOX_KAFKA holds something that librdkafka does not take.
        """
        self._topic = names.leader_topic
        self._progress_topic = names.progress_topic
        self._settings = settings
        self._codec = HeartbeatCodec(names.leader_topic, signer, instance)
        self._unsigned: LeaderHeartbeat | None = None
        self._warned = False
        self._reading = _HeartbeatErrorLog(f"may not be read from the topic {names.leader_topic}")
        self._writing = _HeartbeatErrorLog(f"cannot be written to the topic {names.leader_topic}")
        self._has_left = False
        self._owned: set[int] = set()
        self._sender_lock = threading.Lock()
        # Sticky: a harvester that joins takes no shard from one that leads it. In at-least-once delivery, the group may
        # be shared with goharvest, whose client knows only the older assignors.
        self._sticky = settings.delivery == "exactly-once"
        with ExitStack() as opened:  # What is opened is closed, whatever a later step raises.
            try:
                self._member = opened.enter_context(closing(self._new_member(names)))
                self._listener = opened.enter_context(closing(self._new_listener(names)))
                self._sender = opened.enter_context(closing(self._new_sender()))
            except KafkaException as error:
                raise refused_property(error) from None
            self._topic_ids: TopicIds | None = None
            if settings.delivery == "exactly-once":
                self._topic_ids = opened.enter_context(closing(TopicIds(settings)))
            self._member.subscribe(
                [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
            )
            self._tail = LeaderTopicTail(self._listener, self._topic, range(shards))
            self._listener.assign(self._tail.starts)
            opened.pop_all()

    def _new_member(self, names: KafkaNames) -> Consumer:
        times = {"session.timeout.ms": SESSION_TIMEOUT_MS, "heartbeat.interval.ms": 500}  # OUTBOX_KAFKA may raise them.
        config = internal_client_config(
            self._settings,
            group_id=names.leader_group,
            group_instance_id=None,  # If all harvesters had one id, each would fence the one before.
            group_protocol="classic",
            enable_auto_commit=False,
            auto_offset_reset="latest",
            partition_assignment_strategy="cooperative-sticky" if self._sticky else "range,roundrobin",
            topic_metadata_refresh_interval_ms=5_000,
        )
        return Consumer(times | config)

    def _new_listener(self, names: KafkaNames) -> Consumer:
        return Consumer(
            internal_client_config(
                self._settings,
                group_id=names.leader_group,  # The client requires a group. This consumer does not join it.
                group_instance_id=None,
                enable_auto_commit=False,
                auto_offset_reset="latest",
                fetch_wait_max_ms=100,
                fetch_min_bytes=1,
            )
        )

    def _new_sender(self) -> Producer:
        return Producer(
            internal_client_config(self._settings, enable_idempotence=True, linger_ms=0, message_timeout_ms=3_000)
        )

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._sticky:
            consumer.incremental_assign(partitions)
        else:
            consumer.assign(partitions)
        consumer.pause(partitions)  # The listener reads; this one only owns.
        self._owned.update(each.partition for each in partitions)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._sticky:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()
        self._owned.difference_update(each.partition for each in partitions)

    def owned(self) -> frozenset[int]:
        """The shards whose partitions the group coordinator has given us, as far as we know."""
        message = self._member.poll(0)
        if message is not None and (error := message.error()) is not None and is_fatal(error):
            raise connection_error(error, self._settings)
        return frozenset(self._owned)

    def receive(self, wait_seconds: float) -> Iterator[LeaderHeartbeat]:
        """New heartbeats of this outbox's harvesters; waits up to `wait_seconds` for the first.

        What comes after `RECEIVE_SECONDS` is left to the next call: the topic may get records without end.
        """
        deadline = time.monotonic() + wait_seconds + RECEIVE_SECONDS
        while (message := self._listener.poll(wait_seconds)) is not None:
            wait_seconds = 0
            if (error := message.error()) is not None:
                if error.code() in FORBIDDEN_TOPIC:
                    self._reading.note(error, message)
            elif (heartbeat := self._take(message)) is not None:
                yield heartbeat
            if time.monotonic() > deadline:
                break

    def _take(self, message: Message) -> LeaderHeartbeat | None:
        """The heartbeat that a record is; None unless it is new, one of this outbox, and sent after we connected."""
        self._reading.note(None, message)
        record = LeaderRecord(message.partition() or 0, message.offset() or 0, *content(message))
        heartbeat = self._codec.decode(record)
        is_new = self._codec.is_new(record, heartbeat)
        if self._tail.take(record, heartbeat if is_new else None):
            return None
        if heartbeat is None and not (self._settings.leader_topic and is_goharvests(record.value)):
            self._unsigned = LeaderHeartbeat.parse(record.value) or self._unsigned
            self._warn(record)
        return heartbeat if is_new else None

    def _warn(self, record: LeaderRecord) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "ignoring records of the topic %s that no harvester of this version has signed for this outbox; the "
                "first is at offset %d of partition %d",
                self._topic,
                record.offset,
                record.shard,
                extra={"topic": self._topic, "shard": record.shard},
            )

    def take_vacant(self) -> set[int]:
        """The shards of which `receive` has found since the last call that nobody led them when we connected."""
        return self._tail.take_vacant()

    def take_unsigned_heartbeat(self) -> LeaderHeartbeat | None:
        """The last unsigned heartbeat since the last call. Anybody who may write to the topic can have written it."""
        unsigned, self._unsigned = self._unsigned, None
        return unsigned

    def check_topic(self) -> None:
        """Raises TopicMissing if the brokers do not know the leader topic. No answer raises nothing."""
        with suppress(KafkaException):
            found = self._listener.list_topics(self._topic, timeout=_CHECK_SECONDS).topics.get(self._topic)
            if found is not None and found.error is not None and found.error.code() in UNKNOWN_TOPIC:
                raise TopicMissing(f"Kafka: the topic {self._topic} is gone")

    def check_progress_topic(self) -> None:
        """Raises TopicMissing if the progress topic was deleted and recreated. Waits for nothing."""
        if self._topic_ids is not None and self._topic_ids.recreated({self._progress_topic}):
            raise TopicMissing(f"Kafka: the topic {self._progress_topic} was deleted and recreated")

    def send(self, heartbeat: LeaderHeartbeat) -> None:
        """Send a heartbeat to its shard's partition, without waiting; one that cannot be sent in time is dropped.

        A producer that has met a fatal error sends nothing any more, so another one takes its place.
        """
        with self._sender_lock:
            with suppress(BufferError, KafkaException, LogUnavailable):
                self._produce_or_replace(heartbeat)
            self._sender.poll(0)  # Also where the queue is full: heartbeats that have expired leave it only here.

    def _produce_or_replace(self, heartbeat: LeaderHeartbeat) -> None:
        try:
            self._produce(heartbeat)
        except KafkaException as error:
            if not is_fatal(error.args[0]):
                raise
            logger.warning("the producer of heartbeats has failed, and is replaced: %s", error.args[0].str())
            self._sender.purge()
            self._sender = self._new_sender()
            self._produce(heartbeat)

    def _produce(self, heartbeat: LeaderHeartbeat) -> None:
        key, value, headers = self._codec.encode(heartbeat)
        self._sender.produce(
            self._topic,
            key=key,
            value=value,
            partition=heartbeat.shard,
            headers=list(headers),
            on_delivery=self._writing.on_delivery,
        )

    def leave(self, timeout_seconds: float) -> None:
        """Send what is to be sent, leave the group at once, and close. Safe to call twice."""
        if self._has_left:
            return
        self._has_left = True
        with ExitStack() as opened:  # Whatever one of them raises, the others are closed, in the opposite order.
            if self._topic_ids is not None:
                opened.callback(self._topic_ids.close)
            opened.callback(self._listener.close)
            opened.callback(self._member.close)
            opened.callback(self._sender.close)
            self._sender.flush(timeout_seconds)
            self._sender.purge()
