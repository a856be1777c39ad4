"""Kafka clients as this package configures them, and librdkafka's errors in our words."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from outbox_plugin.core.shards import Slice
from outbox_plugin.core.signing import Headers
from outbox_plugin.errors import Fenced, InvalidSetting, LogUnavailable, OutcomeUnknown, ServerRefused, TermEnded
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.kafka")

LEADER_SUFFIX, PROGRESS_SUFFIX = "-leader", "-progress"  # Of a group's topics.
DEFAULT_LARGEST_RECORD_BYTES = 1_000_000  # librdkafka's own.
REQUEST_TIMEOUT_SECONDS = 10.0
REACH_SECONDS = 5.0  # At start, when a user waits for what is wrong.
# librdkafka's own lines: kept away from the terminal unless somebody listens to this logger.
LIBRARY_LOGGER = logging.getLogger("outbox_plugin.librdkafka")
LIBRARY_LOGGER.setLevel(logging.CRITICAL + 1)

_FENCED = {
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
}
_NOT_LET_IN = {
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError._SSL,
}
_DONE_BY_ANOTHER = {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.INVALID_PARTITIONS}

_OTHER_NAMES = {"linger.ms": "queue.buffering.max.ms", "message.timeout.ms": "delivery.timeout.ms"}  # librdkafka's.

UNKNOWN_TOPIC = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}
_NO_LEADER_YET = {*UNKNOWN_TOPIC, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}


@dataclass(frozen=True, slots=True)
class Names:
    """What a group calls its things in Kafka; topic and group of the election may be another's, to share it."""

    group: str
    leader_topic: str
    leader_group: str

    @classmethod
    def of(cls, settings: Settings) -> Names:
        """The names that `settings` ask for."""
        election = settings.group + LEADER_SUFFIX
        return cls(settings.group, settings.leader_topic or election, settings.leader_group or election)

    @property
    def progress_topic(self) -> str:
        """Progress records; compacted, one partition a shard, a key a slice."""
        return self.group + PROGRESS_SUFFIX

    def transactional_id(self, slice_: Slice, generation: int = 0) -> str:
        """The id whose producers fence each other; see `core.generations`."""
        return f"{self.group}-{slice_.name}" + (f"-g{generation}" if generation else "")


def client_config(settings: Settings, **ours: Any) -> dict[str, Any]:
    """A librdkafka configuration: ours (dots written as underscores), and the user's laid over it."""
    named = {name.replace("_", "."): value for name, value in ours.items()}
    return {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": "outbox",
        "logger": LIBRARY_LOGGER,
        **named,
        **settings.kafka,
    }


def own_config(settings: Settings, **required: Any) -> dict[str, Any]:
    """The configuration of a client for our own topics, whose work rests on what is `required` (written as in
    `client_config`; None: the property may not be set at all).

    The user's properties hold, too, where they say how to reach Kafka. Their tuning is meant for events and inboxes.
    """
    named = {name.replace("_", "."): value for name, value in required.items()}
    ours = named.keys() | {_OTHER_NAMES[name] for name in named.keys() & _OTHER_NAMES.keys()}
    theirs = {name: value for name, value in client_config(settings).items() if name not in ours}
    return theirs | {name: value for name, value in named.items() if value is not None}


def largest_record_bytes(settings: Settings) -> int:
    """How many bytes a record may have at most: librdkafka's `message.max.bytes`, before any compression."""
    return int(settings.kafka.get("message.max.bytes", DEFAULT_LARGEST_RECORD_BYTES))


def refused_property(error: KafkaException) -> InvalidSetting:
    """What to say when librdkafka does not take a configuration."""
    return InvalidSetting(f"OUTBOX_KAFKA: {error.args[0].str()}")


def ended(error: KafkaError, doing: str, *, unpublished: bool) -> TermEnded | LogUnavailable:
    """What `error`, met while `doing` something in a transaction, means for the term.

    Args:
        error: what librdkafka says.
        doing: what was being done, for the message.
        unpublished: the transaction is known not to be committed, now or later.
    """
    message = f"Kafka, {doing}: {error.str()}"
    if error.code() in _FENCED:
        return Fenced(message)
    return LogUnavailable(message) if unpublished else OutcomeUnknown(message)


def refusal(error: KafkaError, settings: Settings) -> ServerRefused | LogUnavailable:
    """What `error`, met at start or in a read, means: refused for good, or away for now."""
    said = f"Kafka, as OUTBOX_BOOTSTRAP_SERVERS names it ({settings.bootstrap_servers}): {error.str()}"
    return ServerRefused(said) if error.code() in _NOT_LET_IN else LogUnavailable(said)


_HEADERS = methodcaller("headers")


def content(message: Message) -> tuple[bytes | None, bytes | None, Headers]:
    """A record's key, value and headers as they are."""
    key, value = (body.encode() if isinstance(body, str) else body for body in (message.key(), message.value()))
    return key, value, readable_headers(message) or []


def readable_headers(message: Message) -> Headers | None:
    """A record's headers in their order; None where a name among them is not UTF-8.

    confluent_kafka cannot return such headers: it sets an error and returns a list that must not be touched. The error
    is raised by the first call alone, so call this once for each message. Python notices it only where the call goes
    through C, as in `methodcaller`: a call that the interpreter has specialised leaves it pending for any later one.
    """
    try:
        headers = _HEADERS(message) or []
    except (SystemError, UnicodeDecodeError):
        return None
    return list(headers.items()) if isinstance(headers, dict) else headers


def bounds(consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """The partition's first offset and its end; waits while it has no leader yet, as right after its creation.

    Raises:
        KafkaException: it cannot be had.
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while True:
        try:
            first, end = consumer.get_watermark_offsets(partition, timeout=REQUEST_TIMEOUT_SECONDS)
            return first, end
        except KafkaException as error:
            if error.args[0].code() not in _NO_LEADER_YET or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _may_be_written(answer: Future[Any]) -> bool:
    try:
        operations = answer.result(REQUEST_TIMEOUT_SECONDS).authorized_operations
    except (KafkaException, TimeoutError):
        return True
    return operations is None or bool({AclOperation.WRITE, AclOperation.ALL} & set(operations))


class Admin:
    """The few things that are asked of the cluster itself."""

    def __init__(self, settings: Settings) -> None:
        """Make a client; no connection yet.

        Raises:
            InvalidSetting: OUTBOX_KAFKA names a property that does not exist, or gives it a value it does not take.
        """
        self._settings = settings
        # Not a method: the client would keep this object alive, and it the client with its threads.
        self._problems: deque[KafkaError] = deque(maxlen=1)
        try:
            config: dict[str, Any] = {**client_config(settings), "error_cb": self._problems.append}
            self.client = AdminClient(config)
        except KafkaException as error:
            raise refused_property(error) from None

    def check_reachable(self) -> None:
        """Raises ServerRefused unless a broker answers in time; the reason is the client's own."""
        try:
            self.client.list_topics(timeout=REACH_SECONDS)
        except KafkaException as error:
            self.client.poll(0)
            problem = self._problems[-1] if self._problems else error.args[0]
            raise ServerRefused(str(refusal(problem, self._settings))) from None

    def ensure_topics(self, names: Names, shards: int, *, progress: bool = True) -> None:
        """Create the group's topics where they are missing, and add partitions where they have fewer than `shards`.

        Raises:
            ServerRefused: we may not.
            LogUnavailable: Kafka is away.
        """
        wanted: dict[str, Mapping[str, str]] = {
            names.leader_topic: {"cleanup.policy": "delete", "retention.ms": "3600000"}
        }
        if progress:  # Must never expire: it proves what was published, however long ago.
            wanted[names.progress_topic] = {"cleanup.policy": "compact", "segment.ms": "3600000"}
        try:
            existing = self.client.list_topics(timeout=REQUEST_TIMEOUT_SECONDS).topics
            missing = [
                NewTopic(topic, num_partitions=shards, config=dict(config))
                for topic, config in wanted.items()
                if topic not in existing
            ]
            small = [
                NewPartitions(topic, shards)
                for topic in wanted
                if topic in existing and len(existing[topic].partitions) < shards
            ]
            futures: list[Future[None]] = []
            if missing:
                futures += self.client.create_topics(missing, operation_timeout=REQUEST_TIMEOUT_SECONDS).values()
            if small:
                futures += self.client.create_partitions(small, operation_timeout=REQUEST_TIMEOUT_SECONDS).values()
            for future in futures:
                self._created(future)
        except KafkaException as error:
            raise refusal(error.args[0], self._settings) from error

    @staticmethod
    def _created(future: Future[None]) -> None:
        try:
            future.result(REQUEST_TIMEOUT_SECONDS)
        except TimeoutError:
            raise LogUnavailable("Kafka does not answer whether it makes a topic") from None
        except KafkaException as error:
            if error.args[0].code() not in _DONE_BY_ANOTHER:
                raise

    def writable(self, topics: Collection[str]) -> set[str]:
        """Those of `topics` that we may write to, or of which Kafka does not say."""
        asked = self.client.describe_topics(
            TopicCollection(sorted(topics)),
            include_authorized_operations=True,
            request_timeout=REQUEST_TIMEOUT_SECONDS,
        )
        return {topic for topic, answer in asked.items() if _may_be_written(answer)}

    def keep_progress(self, names: Names) -> str | None:
        """See that the progress topic never expires, as one would that somebody else, or the broker, has made.

        Returns a warning where it will and we may not change that; None where all is well or the broker does not say.
        """
        topic = names.progress_topic
        try:
            [asked] = self.client.describe_configs(
                [ConfigResource(ResourceType.TOPIC, topic)], request_timeout=REQUEST_TIMEOUT_SECONDS
            ).values()
            policy = asked.result(REQUEST_TIMEOUT_SECONDS)["cleanup.policy"].value
        except (KafkaException, TimeoutError):
            return None
        if policy == "compact":
            return None
        compact = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
        try:
            [changed] = self.client.incremental_alter_configs(
                [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[compact])],
                request_timeout=REQUEST_TIMEOUT_SECONDS,
            ).values()
            changed.result(REQUEST_TIMEOUT_SECONDS)
        except (KafkaException, TimeoutError):
            return f"the topic {topic} has cleanup.policy={policy}; it must be `compact`: what it says is lost"
        logger.warning(
            "the topic %s had cleanup.policy=%s, under which what it says is lost; it is compact now", topic, policy
        )
        return None
