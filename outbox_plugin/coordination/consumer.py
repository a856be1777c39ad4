"""A consumer that shares topics with others of its group: iterate it or poll it, and commit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

import confluent_kafka
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin.adapters.fetched_watermarks import fetched_watermarks
from outbox_plugin.adapters.kafka_clients import client_config, connection_error, readable_headers, refused_property
from outbox_plugin.adapters.kafka_connection_warnings import ConnectionWarnings
from outbox_plugin.coordination.claims import Claim
from outbox_plugin.coordination.events import ClaimEvent
from outbox_plugin.coordination.fetch_buffer import FetchBuffer
from outbox_plugin.coordination.heartbeat_timing import HEARTBEAT_INTERVAL_SECONDS, HeartbeatTiming
from outbox_plugin.coordination.instance import Instance
from outbox_plugin.coordination.log import TOPIC, CoordinationLog
from outbox_plugin.coordination.messages import VERSION, ClaimingPartition, encode
from outbox_plugin.coordination.partition_owners import TOPIC_CLIENT, Holder
from outbox_plugin.core.leader_epochs import Finding, GroupPosition, LeaderEpochs
from outbox_plugin.core.memory_limit import Load, MemoryLimit, record_size
from outbox_plugin.core.topic_partition import TopicPartition, topic_partition
from outbox_plugin.errors import LogUnavailable, ServerRefused, UserError
from outbox_plugin.insecure_settings import warn_about_insecure_settings
from outbox_plugin.kafka_settings import kafka_settings
from outbox_plugin.observe.metrics_extra import metrics_extra
from outbox_plugin.printable import logger_of

if TYPE_CHECKING:  # It needs an extra.
    from outbox_plugin.coordination.consumer_telemetry import ConsumerTelemetry

LOGGER = logger_of(__name__)

Guarantee = Literal["at-least-once", "at-most-once"]

BATCH = 1_000  # Records that are fetched and not yet handed out, at most. With at-most-once, a kill loses these.
# The same bound for their memory. One more record than fits may be held, of whatever size, and what librdkafka has
# fetched ahead when the last record was taken.
BATCH_BYTES = 16_000_000
MEMORY_LIMIT = MemoryLimit(BATCH, BATCH_BYTES)  # It is shared out among the partitions: one alone has half.
QUEUED_KILOBYTES = 4_096  # What librdkafka may fetch ahead.
FOLLOW_SECONDS = 0.05  # Between two checks of which partitions we hold.
GATHER_SECONDS = 0.005  # How long to wait for more records after the first one.
PROMISED_GATHER_SECONDS = 0.05  # The same with at-most-once: the promise for each batch takes about as long.
PROMISE_SECONDS = 5.0
MIN_PROMISE_SECONDS = 1.0  # The shortest wait for a promise, also if `poll` has less time; most take milliseconds.


def _nothing(_: ClaimEvent) -> None:
    """Observe nothing."""


class Consumer:
    """Consumes partitions that no other instance of the group holds; the coordination topic decides which.

    Example: `with Consumer(["orders"], "billing", "worker-1") as orders: for each in orders: …; orders.commit(each)`.
    Not safe for threads; only `stop` may be called from any thread, and from a signal handler.
    """

    def __init__(
        self,
        topics: Sequence[str],
        group_id: str,
        client_id: str,
        guarantee: Guarantee = "at-least-once",
        *,
        max_claims: int | None = None,
        heartbeat_interval_seconds: float = HEARTBEAT_INTERVAL_SECONDS,
        idle_seconds: float = 300.0,
        coordination_topic: str = TOPIC,
        bootstrap_servers: str | None = None,
        kafka: dict[str, str] | None = None,
        observe: Callable[[ClaimEvent], None] = _nothing,
        listen: str | None = None,
    ) -> None:
        """Connect, take over what this client held, and start to claim partitions.

        Args:
            topics: the topics to consume; a topic that does not exist yet is consumed once it does.
            group_id: the group that shares the topics; also names its offsets in Kafka's own store.
            client_id: this consumer's name in its group, one at a time; one that comes back goes on with its claims.
            guarantee: at-least-once repeats records that were not committed; at-most-once repeats none.
            max_claims: the highest number of partitions that this instance holds; None for its share of them.
            heartbeat_interval_seconds: the same for all of a group (Marshal's own: 60). Others take over the partitions
                of an instance that writes no heartbeat for two intervals.
            idle_seconds: after this time without a `poll`, all partitions are released.
            coordination_topic: the topic of the claims; it is created if it is missing.
            bootstrap_servers: Kafka brokers; OUTBOX_BOOTSTRAP_SERVERS where it is None.
            kafka: librdkafka properties; OUTBOX_KAFKA where it is None.
            observe: is called with each partition that is gained or lost, on another thread. What it raises is logged
                once, and ends nothing.
            listen: PORT or HOST:PORT that serves metrics and probes until the `close`; None for none, whatever
                OUTBOX_LISTEN says.

        Raises:
            UserError: an argument is wrong; one line says which.
            InvalidSetting: brokers or properties are missing or wrong, or the port cannot be had.
            ServerRefused: no broker answers, or it refuses us.
        """
        _check(topics, group_id, client_id, guarantee, max_claims, heartbeat_interval_seconds)
        self._settings = kafka_settings(bootstrap_servers, kafka, listen)
        warn_about_insecure_settings(self._settings, postgres=False)
        self._at_most_once = guarantee == "at-most-once"
        self._assigned: dict[TopicPartition, Claim] = {}
        self._fetched: FetchBuffer[Message] = FetchBuffer()
        self._epochs = LeaderEpochs()  # Of what was fetched with each claim. They show truncated partitions.
        self._paused: set[TopicPartition] = set()  # Those that hold too much to be fetched from.
        self._asked: dict[TopicPartition, tuple[Claim, int]] = {}  # What the log was asked to promise last.
        self._followed = float("-inf")
        self._stopped = False
        self._committed_at: float | None = None
        self._telemetry: ConsumerTelemetry | None = None  # Where there is a port.
        with ExitStack() as opened:  # What is opened is closed, whatever a later step raises.
            self._log = opened.enter_context(closing(CoordinationLog(self._settings, coordination_topic, group_id)))
            self._reader = opened.enter_context(closing(self._connect(group_id)))
            self._instance = Instance(
                self._log,
                Holder(uuid.uuid4().hex[:12], client_id),
                group_id,
                topics,
                HeartbeatTiming(heartbeat_interval_seconds, idle_seconds),
                at_most_once=self._at_most_once,
                limit=max_claims,
                observe=observe,
            )
            opened.pop_all()
        try:
            if self._settings.listen is not None:
                self._telemetry = self._listen(self._settings.listen, topics)
            self._instance.start()
            if self._telemetry is not None:
                self._telemetry.poll_lag()
        except BaseException:
            self.close()
            raise

    def _connect(self, group_id: str) -> confluent_kafka.Consumer:
        try:
            return confluent_kafka.Consumer(
                client_config(
                    self._settings,
                    group_id=group_id,  # The library requires it; this client joins no group and commits nothing.
                    enable_auto_commit=False,
                    enable_auto_offset_store=False,
                    fetch_wait_max_ms=100,
                    queued_min_messages=BATCH,
                    queued_max_messages_kbytes=QUEUED_KILOBYTES,
                    fetch_max_bytes=QUEUED_KILOBYTES * 1_024,
                )
                # OUTBOX_KAFKA must not make it skip records.
                | {"auto.offset.reset": "earliest", "enable.partition.eof": True}
                | {"error_cb": ConnectionWarnings(LOGGER)}
            )
        except KafkaException as error:
            raise refused_property(error) from None
        except LogUnavailable as error:  # There is no token for Kafka any more.
            raise ServerRefused(str(error)) from None

    def _listen(self, listen: str, topics: Sequence[str]) -> ConsumerTelemetry:
        with metrics_extra():
            from outbox_plugin.coordination.consumer_telemetry import ConsumerTelemetry
        return ConsumerTelemetry(
            self._settings,
            listen,
            self._instance.group_id,
            self._instance.me.client_id,
            topics,
            error=self._instance.error,
            facts=self._instance.facts,
            unclaimed=self._instance.unclaimed,
            committed_at=lambda: self._committed_at,
        )

    @property
    def instance_id(self) -> str:
        """The id of this run of the client in the coordination topic."""
        return self._instance.me.instance_id

    @property
    def claims(self) -> dict[tuple[str, int], int]:
        """The partitions that are held, and the offset of each at which another instance would go on."""
        return {tp: claim.offset for tp, claim in self._instance.held().items()}

    @property
    def malformed(self) -> int:
        """How many messages of the coordination topic were skipped because they do not follow the protocol."""
        return self._log.malformed

    def poll(self, timeout_seconds: float = 1.0) -> Message | None:
        """Return the next record; None if none came in time, as always while the group is paused.

        At most once, a record counts as consumed before it is returned. The coordination topic must confirm that, which
        may take about a second longer than `timeout_seconds`, and more while Kafka is away.

        Args:
            timeout_seconds: how long to wait for a record; 0 fetches once without waiting.

        Raises:
            OutboxError: waiting cannot mend the fault.
        """
        deadline, fetched = time.monotonic() + timeout_seconds, False
        while not self._stopped:
            now = time.monotonic()
            if now - self._followed >= FOLLOW_SECONDS:
                self._followed = now
                self._follow_claims()
            message = self._fetched.next(self._instance.may_hand_out)
            if message is not None:
                return message
            if now > deadline and fetched:  # Even with a timeout of 0, it fetches once.
                return None
            self._fetch(min(FOLLOW_SECONDS, max(0.0, deadline - now)), deadline)
            fetched = True
        return None

    def __iter__(self) -> Iterator[Message]:
        """Yield all records as they come, until `stop`."""
        while not self._stopped:
            message = self.poll()
            if message is not None:
                yield message

    def commit(self, message: Message) -> bool:
        """Note that a record is done; records may be committed in any order.

        The next heartbeat writes the new offset. At most once, this does nothing.

        Args:
            message: a record that `poll` returned.

        Returns:
            Whether we still hold its partition; if not, another instance gets the record again.
        """
        self._committed_at = time.time()
        return self._instance.done(
            TopicPartition(message.topic() or "", message.partition() or 0), message.offset() or 0
        )

    def stop(self) -> None:
        """End an iteration or a `poll` soon; the partitions stay ours until `close`."""
        self._stopped = True

    def close(self, *, release: bool = True) -> None:
        """Write our offsets, release all partitions, and disconnect. A second call does nothing.

        Args:
            release: False keeps the claims for the next run of this client, if it starts within two heartbeat
                intervals. At most once, records that were fetched and not yet returned are lost then.
        """
        self._stopped = True
        telemetry, self._telemetry = self._telemetry, None
        with ExitStack() as opened:  # Whatever one of them raises, the others are closed, in the opposite order.
            if telemetry is not None:
                opened.callback(telemetry.close)
            opened.callback(self._reader.close)
            opened.callback(self._log.close)
            self._instance.stop(keep=not release)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow_claims(self) -> None:
        """Fetch from the partitions that we hold now, each from its claim's offset."""
        held = self._instance.claims()
        gone = [tp for tp, claim in self._assigned.items() if held.get(tp) is not claim]
        if gone:
            self._resume(self._paused.intersection(gone))
            self._reader.incremental_unassign([KafkaTopicPartition(*tp) for tp in gone])
            for tp in gone:
                del self._assigned[tp]
                self._fetched.forget(tp)
        new = [tp for tp in held if tp not in self._assigned]
        if new:
            self._reader.incremental_assign([KafkaTopicPartition(*tp, held[tp].position) for tp in new])
            self._assigned.update((tp, held[tp]) for tp in new)
            for tp in new:
                self._epochs.start(tp, GroupPosition(held[tp].position))

    def _fetch(self, wait_seconds: float, deadline: float) -> None:
        """Add records that have arrived to the queues. At most once, also ask the log to promise them to us."""
        self._share_room()
        free = MEMORY_LIMIT.free(self._fetched.load())
        if free.records > 0 and free.size > 0:
            self._take_in(wait_seconds)
        elif not self._at_most_once or not self._unpromised():  # The log must first confirm that we hold them.
            time.sleep(wait_seconds)
        if self._at_most_once and (unpromised := self._unpromised()):
            self._promise(unpromised, deadline)

    def _share_room(self) -> None:
        """Fetch nothing of the partitions whose waiting records leave too little room for the other partitions."""
        held = self._fetched.load()
        if self._paused:
            waiting = self._fetched.loads()
            loads = {tp: waiting.get(tp, Load(0, 0)) for tp in self._paused}
            self._resume(MEMORY_LIMIT.to_resume(held, loads))
        if not MEMORY_LIMIT.is_half_free(held):
            self._pause(MEMORY_LIMIT.to_pause(held, self._fetched.loads()).intersection(self._assigned) - self._paused)

    def _pause(self, partitions: Collection[TopicPartition]) -> None:
        if partitions:
            self._paused.update(partitions)
            self._reader.pause([KafkaTopicPartition(*tp) for tp in partitions])

    def _resume(self, partitions: Collection[TopicPartition]) -> None:
        if partitions:
            self._paused.difference_update(partitions)
            self._reader.resume([KafkaTopicPartition(*tp) for tp in partitions])

    def _take_in(self, wait_seconds: float) -> None:
        """Wait for a record, and add it and those that follow soon, as far as there is room."""
        if (first := self._reader.poll(wait_seconds)) is None:
            return
        self._add([first])
        if most := MEMORY_LIMIT.records_to_poll(self._fetched.load(), BATCH):
            self._add(self._reader.consume(most, PROMISED_GATHER_SECONDS if self._at_most_once else GATHER_SECONDS))

    def _add(self, messages: Sequence[Message]) -> None:
        come_again: set[TopicPartition] = set()
        noted: set[TopicPartition] = set()
        for message in messages:
            tp, error = topic_partition(message.topic() or "", message.partition() or 0), message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                if not isinstance(problem := connection_error(error, self._settings), LogUnavailable):
                    raise problem
                continue
            claim = self._assigned.get(tp)
            if claim is None or tp in come_again:
                continue
            if tp not in noted and error is None:
                noted.add(tp)
                self._epochs.note_end(tp, fetched_watermarks(self._reader, tp)[1])
            if error is None and self._goes_on(tp, claim, message):
                self._buffer(tp, claim, message)
            elif self._may_follow_truncation(tp, claim, message):
                self._reader.seek(KafkaTopicPartition(*tp, self._epochs.fetch_again(tp, message.offset() or 0)))
                come_again.add(tp)
            elif error is None and not self._add_record(tp, claim, message):
                self._reader.seek(KafkaTopicPartition(*tp, OFFSET_BEGINNING))
                come_again.add(tp)

    def _goes_on(self, tp: TopicPartition, claim: Claim, message: Message) -> bool:
        """Whether a record follows the one before it, at our position or after it, and shows nothing else."""
        offset = message.offset() or 0
        return offset >= claim.position and self._epochs.goes_on(tp, offset, message.leader_epoch())

    def _may_follow_truncation(self, tp: TopicPartition, claim: Claim, message: Message) -> bool:
        """Whether a record, or the end of a partition, may stand behind others that were not fetched.

        librdkafka goes on at the new end, and drops what it has fetched (`core.leader_epochs`).
        """
        offset, (beginning, end) = message.offset() or 0, fetched_watermarks(self._reader, tp)
        if message.error() is not None:
            return self._epochs.may_end_at_truncation(tp, offset, end)
        if self._epochs.goes_back(tp, offset):
            LOGGER.warning("%s [%d] was truncated: a part of it is fetched again", *tp)
            self._epochs.note_truncation(tp, self._reached(tp, claim))
            return False
        return self._epochs.may_follow_truncation(tp, offset, message.leader_epoch(), lambda _: beginning)

    def _add_record(self, tp: TopicPartition, claim: Claim, message: Message) -> bool:
        """Add a record, unless it was fetched before, or stands below our position because the partition was truncated.

        Returns False if nobody knows where the partition was truncated: then it is to be read from its beginning.
        """
        offset = message.offset() or 0
        finding = self._epochs.add(tp, offset, message.leader_epoch(), key_may_be_forgotten=True)
        if finding is Finding.TRUNCATED or (
            finding is Finding.GONE and self._epochs.is_truncated(tp, fetched_watermarks(self._reader, tp)[0])
        ):
            LOGGER.warning(
                "%s [%d] was truncated: it is fetched from its beginning, what was written since is new", *tp
            )
            self._epochs.restart(tp, self._reached(tp, claim))
            return False
        if finding is Finding.HANDLED:
            return True
        if offset < claim.position and self._is_new(tp, message):
            self._instance.go_back(tp, claim, offset)
        else:
            self._buffer(tp, claim, message)
        return True

    def _buffer(self, tp: TopicPartition, claim: Claim, message: Message) -> None:
        """Add a record to the queue of its claim. Those that stand there from the same offset on are not in Kafka."""
        offset = message.offset() or 0
        self._fetched.truncate(tp, offset)
        size = record_size(message.key(), message.value(), cast(Any, readable_headers(message)) or ())
        self._fetched.add(tp, claim, offset, message, size)

    def _is_new(self, tp: TopicPartition, message: Message) -> bool:
        """Whether a record that stands below our position takes the place of another one.

        Where we know the epochs of the records that were consumed, it does. Otherwise nobody knows: the partition may
        have been truncated while nobody read it. At least once, the record is consumed then, maybe again. Where Kafka
        tells no epochs, it counts as an old one.
        """
        return message.leader_epoch() is not None and (
            not self._at_most_once or bool(self._epochs.started_at(tp).handled)
        )

    def _reached(self, tp: TopicPartition, claim: Claim) -> GroupPosition:
        """Up to where a partition was fetched, and the epoch of the record before that."""
        next_offset = max(claim.position, self._fetched.end(tp))
        return GroupPosition(next_offset, self._epochs.before(tp, next_offset))

    def _promise(self, unpromised: Mapping[TopicPartition, tuple[Claim, int]], deadline: float) -> None:
        """Ask the log to promise records to us. While we hold them, an unanswered request is repeated."""
        left = deadline - time.monotonic()
        self._instance.promise(unpromised, min(PROMISE_SECONDS, max(left, MIN_PROMISE_SECONDS)))
        held = self._instance.claims()
        for tp, (claim, _) in self._fetched.ends().items():
            if held.get(tp) is not claim:
                self._fetched.forget(tp)

    def _unpromised(self) -> dict[TopicPartition, tuple[Claim, int]]:
        """The claims with fetched records that the log has not promised to us yet, each with the offset to ask for.

        While a request is unanswered, its offset stays the same even if more was fetched: the answer may be late.
        """
        asked: dict[TopicPartition, tuple[Claim, int]] = {}
        for tp, (claim, end) in self._fetched.ends().items():
            if end > claim.promised:
                before = self._asked.get(tp, (claim, 0))
                asked[tp] = before if before[0] is claim and before[1] > claim.promised else (claim, end)
        self._asked = asked
        return asked


def _check(
    topics: Sequence[str], group_id: str, client_id: str, guarantee: str, max_claims: int | None, interval: float
) -> None:
    """Raise UserError for arguments that the protocol cannot carry or that make no sense."""
    if isinstance(topics, str) or not topics or not all(isinstance(topic, str) for topic in topics):
        raise UserError(f"topics: expected a list of topic names, such as ['orders'] (given: {topics!r})")
    if guarantee not in get_args(Guarantee):
        raise UserError(f"guarantee: expected {' or '.join(get_args(Guarantee))} (given: {guarantee!r})")
    if max_claims is not None and max_claims < 1:
        raise UserError(f"max_claims: expected 1 or more, or None for no limit (given: {max_claims})")
    if not interval >= 1:
        raise UserError(
            f"heartbeat_interval_seconds: expected 1 or more: its times are whole seconds (given: {interval})"
        )
    if client_id == TOPIC_CLIENT:
        raise UserError(f"client_id: {TOPIC_CLIENT} is the name by which topics are spoken of (given: {client_id!r})")
    for topic in topics:
        encode(ClaimingPartition(VERSION, 0, "instance", client_id, group_id, topic, 0))
