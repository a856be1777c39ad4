"""Administers Kafka: checks that it can be reached, creates our topics, and finds topics that we may not write to."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ListOffsetsResultInfo,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)

from outbox_plugin.adapters.kafka_clients import (
    REACH_SECONDS,
    REQUEST_TIMEOUT_SECONDS,
    UNKNOWN_TOPIC,
    answer_of,
    client_config,
    connection_error,
    refused_property,
)
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.errors import LogUnavailable, ServerRefused
from outbox_plugin.printable import logger_of
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.kafka")

# How long a client goes by what it knows of leaders; 15 minutes by default. Requests for offsets name the epoch of a
# leader. Where a broker refuses an old epoch, or there was no leader, librdkafka 2.16 does not ask for leaders anew.
_LEADERS_MS = 5_000
# How often a client asks which brokers there are; every five minutes by default. Where the one that it takes for the
# controller has died, it goes on asking that one until then.
_BROKERS_MS = 5_000
_PATIENCE_SECONDS = 0.5  # So often a wait asks whether to go on.
FIRST_OFFSET: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
END_OFFSET: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]
K = TypeVar("K")
_ACL_HINT = "`outbox grants --role harvester --kafka` prints the ACLs that it needs"
_DONE_BY_ANOTHER = {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.INVALID_PARTITIONS}


def offset_of(answer: Future[ListOffsetsResultInfo], timeout_seconds: float) -> int:
    """The offset in an answer of `ask_for_offsets`.

    Where one broker of several does not answer in time, librdkafka 2.16 gives its partitions an offset below 0, and no
    error.

    Args:
        answer: of one partition.
        timeout_seconds: how long to wait.

    Raises:
        KafkaException: Kafka refuses it, or is away.
        TimeoutError: there is no answer yet.
    """
    if (offset := answer_of(answer, timeout_seconds).offset) < 0:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the leader of a partition does not answer"))
    return offset


def offsets_of(answers: Mapping[K, Future[ListOffsetsResultInfo]], timeout_seconds: float) -> dict[K, int]:
    """The offsets of the partitions that were answered, as `offset_of` reads each."""
    found: dict[K, int] = {}
    for each, answer in answers.items():
        with suppress(KafkaException, TimeoutError):
            found[each] = offset_of(answer, timeout_seconds)
    return found


def _may_be_written(answer: Future[TopicDescription]) -> bool:
    try:
        return not _missing_operations([AclOperation.WRITE], answer_of(answer, REQUEST_TIMEOUT_SECONDS))
    except (KafkaException, TimeoutError):
        return True


def _missing_operations(operations: Sequence[AclOperation], topic: TopicDescription) -> list[AclOperation]:
    """Those of the operations that we may not do on the topic; none if Kafka does not say."""
    # Whoever sees a topic may at least describe it: of no operations at all, Kafka has not said anything.
    allowed = set(topic.authorized_operations or ())
    return [each for each in operations if allowed and not {each, AclOperation.ALL} & allowed]


class KafkaAdmin:
    """A client of Kafka's admin API. Close it: one that is only dropped can end the process.

    The library runs Python code, such as the callbacks of futures, on a thread of the client. If the garbage collector
    runs there and finds the client, librdkafka aborts the process: a client must not be destroyed on its own thread.
    """

    def __init__(self, settings: Settings) -> None:
        """Make a client; no connection yet.

        Raises:
            InvalidSetting: OUTBOX_KAFKA names a property that does not exist, or gives it a value it does not take.
            LogUnavailable: OUTBOX_KAFKA_TOKEN_PROVIDER returns no token.
        """
        self._settings = settings
        # Not a method: the client would keep this object alive, and it the client with its threads.
        self._problems: deque[KafkaError] = deque(maxlen=1)
        try:
            config: dict[str, Any] = {
                "metadata.max.age.ms": _LEADERS_MS,
                "topic.metadata.refresh.interval.ms": _BROKERS_MS,
                **client_config(settings),
                "error_cb": self._problems.append,
            }
            self._client = AdminClient(config)
        except KafkaException as error:
            raise refused_property(error) from None
        self._closed = False

    @property
    def client(self) -> AdminClient:
        """The library's client, for a request.

        Its errors and log lines wait for a poll. While Kafka is away there are some hundred a second, so a client that
        sends requests and is never polled fills the memory.
        """
        self._client.poll(0)
        return self._client

    def close(self) -> None:
        """Disconnect. Requests without an answer fail. Safe to call twice."""
        self._closed = True
        self._client.__exit__(None, None, None)

    def __del__(self) -> None:
        """Warn of a client that nobody has closed, and close it on another thread: this one may be its own."""
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            with suppress(RuntimeError):  # There can be no more threads.
                threading.Thread(target=self._client.__exit__, args=(None, None, None), daemon=True).start()
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    @classmethod
    def at_start(cls, settings: Settings) -> Self:
        """Make a client, and check that a broker answers. A user who starts a program learns soon what is wrong.

        Raises:
            InvalidSetting: OUTBOX_KAFKA or OUTBOX_KAFKA_TOKEN_PROVIDER is wrong.
            ServerRefused: no broker answers in time, or there is no token for one.
        """
        try:
            admin = cls(settings)
        except LogUnavailable as error:
            raise ServerRefused(str(error)) from None
        try:
            admin.check_reachable()
        except ServerRefused:
            admin.close()
            raise
        return admin

    def check_reachable(self) -> None:
        """Raise ServerRefused unless a broker answers in time. The message has the client's reason."""
        asked: Future[Any] = self.client.describe_cluster(request_timeout=REACH_SECONDS)
        try:
            answer_of(asked, REACH_SECONDS + 1)
        except KafkaException as error:
            raise ServerRefused(str(self.failure(error.args[0]))) from None
        except TimeoutError:
            raise ServerRefused(str(self.failure(KafkaError(KafkaError._TIMED_OUT)))) from None

    def failure(self, error: KafkaError) -> ServerRefused | LogUnavailable:
        """What `error`, the failure of a new client's request, means. Why it could not connect says more."""
        self._client.poll(0)
        return connection_error(self._problems[-1] if self._problems else error, self._settings)

    def ask_for_offsets(
        self, partitions: Iterable[TopicPartition], spec: OffsetSpec, timeout_seconds: float
    ) -> Mapping[TopicPartition, Future[ListOffsetsResultInfo]]:
        """Request an offset of each partition, without waiting: one request to each broker. `offset_of` reads answers.

        Args:
            partitions: at least one.
            spec: which offset. The latest one is the end that readers of committed records see.
            timeout_seconds: how long the brokers may take.

        Raises:
            KafkaException: the library refuses the request.
        """
        return self.client.list_offsets(
            dict.fromkeys(partitions, spec),
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=timeout_seconds,
        )

    def ensure_topics(
        self, names: KafkaNames, partitions: int, *, progress: bool = True
    ) -> dict[str, TopicDescription]:
        """Create the group's topics if they are missing, and add partitions if they have fewer than `partitions`.

        Args:
            names: of the topics.
            partitions: one for each of the outbox's shards, those of its unsettled layouts included.
            progress: whether the group needs a progress topic, as exactly-once delivery does.

        Returns:
            The topics that we may see, as Kafka has described them: with what we may do with them.

        Raises:
            ServerRefused: we may not create topics or add partitions.
            LogUnavailable: Kafka is away.
        """
        wanted: dict[str, Mapping[str, str]] = {
            names.leader_topic: {"cleanup.policy": "delete", "retention.ms": "3600000"}
        }
        if progress:  # A progress record must never expire: it proves what was published, however long ago.
            wanted[names.progress_topic] = {"cleanup.policy": "compact", "segment.ms": "3600000"}
        try:
            found = self._existing(wanted)
            missing = [
                NewTopic(topic, num_partitions=partitions, config=dict(config))
                for topic, config in wanted.items()
                if topic not in found
            ]
            small = [
                NewPartitions(topic, partitions) for topic, each in found.items() if len(each.partitions) < partitions
            ]
            requests: list[tuple[str, Future[None]]] = []
            if missing:
                requests += self.client.create_topics(missing, operation_timeout=REQUEST_TIMEOUT_SECONDS).items()
            if small:
                requests += self.client.create_partitions(small, operation_timeout=REQUEST_TIMEOUT_SECONDS).items()
            for topic, future in requests:
                self._await_change(topic, future)
            return self._existing(wanted) if missing else found
        except KafkaException as error:
            raise connection_error(error.args[0], self._settings) from error

    def _existing(self, topics: Collection[str]) -> dict[str, TopicDescription]:
        """Those of `topics` that exist, as far as we may see them. It asks for no others: they may be thousands.

        Raises:
            KafkaException: Kafka refuses it, or is away.
            LogUnavailable: there is no answer.
        """
        found = {}
        for topic, answer in self._describe(topics).items():
            try:
                found[topic] = answer_of(answer, REQUEST_TIMEOUT_SECONDS + 1)
            except TimeoutError:
                raise LogUnavailable("Kafka does not answer which topics exist") from None
            except KafkaException as error:
                if error.args[0].code() not in {*UNKNOWN_TOPIC, KafkaError.TOPIC_AUTHORIZATION_FAILED}:
                    raise
        return found

    def _describe(self, topics: Collection[str]) -> Mapping[str, Future[TopicDescription]]:
        """Request descriptions of the topics, which include what we may do with them."""
        return self.client.describe_topics(
            TopicCollection(sorted(topics)),
            include_authorized_operations=True,
            request_timeout=REQUEST_TIMEOUT_SECONDS,
        )

    @staticmethod
    def _await_change(topic: str, future: Future[None]) -> None:
        try:
            answer_of(future, REQUEST_TIMEOUT_SECONDS)
        except TimeoutError:
            raise LogUnavailable("Kafka does not answer whether it makes a topic") from None
        except KafkaException as error:
            problem = error.args[0]
            if problem.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise ServerRefused(
                    f"Kafka: this harvester may not make the topic {topic}, nor add partitions to it, or may not see "
                    f"that it is there; {_ACL_HINT}"
                ) from None
            if problem.code() not in _DONE_BY_ANOTHER:
                raise

    @staticmethod
    def check_rights(topics: Mapping[str, TopicDescription]) -> None:
        """Check that we may read and write the group's `topics`. Where Kafka does not say, nothing is raised.

        Otherwise a harvester that may not, for example, write heartbeats would wait for ever, and not know why.

        Raises:
            ServerRefused: we may not.
        """
        for topic, described in topics.items():
            if forbidden := _missing_operations([AclOperation.READ, AclOperation.WRITE], described):
                missing = " and ".join(each.name.capitalize() for each in forbidden)
                raise ServerRefused(
                    f"Kafka: this harvester lacks the right {missing} on the topic {topic}; {_ACL_HINT}"
                )

    def writable(self, topics: Collection[str]) -> set[str]:
        """Those of `topics` that we may write to, or of which Kafka does not say."""
        return {topic for topic, answer in self._describe(topics).items() if _may_be_written(answer)}

    def keep_progress(self, names: KafkaNames) -> str | None:
        """Set the progress topic's `cleanup.policy` to `compact` where it is another, so that its records never expire.

        An operator, or the broker on first use, may have created the topic with the broker's default policy.

        Returns:
            A warning if the policy is another one and we may not change it; None if all is well, or if the broker does
            not answer.
        """
        topic = names.progress_topic
        policy = self._config(topic, "cleanup.policy")
        if policy is None:
            return None
        if policy == "compact":
            return None
        compact = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.SET)
        try:
            [changed] = self.client.incremental_alter_configs(
                [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[compact])],
                request_timeout=REQUEST_TIMEOUT_SECONDS,
            ).values()
            answer_of(changed, REQUEST_TIMEOUT_SECONDS)
        except (KafkaException, TimeoutError):
            return f"the topic {topic} has cleanup.policy={policy}; it must be `compact`: what it says is lost"
        logger.warning(
            "the topic %s had cleanup.policy=%s, under which what it says is lost; it is compact now", topic, policy
        )
        return None

    def least_in_sync(self, topic: str, should_wait: Callable[[], bool]) -> int | None:
        """How many replicas of a partition must be in sync before it takes records; None if Kafka does not tell us.

        Args:
            topic: one whose configuration we may read.
            should_wait: returns whether waiting still makes sense; called now and then.
        """
        least = self._config(topic, "min.insync.replicas", should_wait)
        return None if least is None else int(least)

    def _config(self, topic: str, name: str, should_wait: Callable[[], bool] = lambda: True) -> str | None:
        """The value of a property of a topic; None if Kafka does not answer, or does not let us read it."""
        try:
            [asked] = self.client.describe_configs(
                [ConfigResource(ResourceType.TOPIC, topic)], request_timeout=REQUEST_TIMEOUT_SECONDS
            ).values()
            deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
            while not asked.done() and should_wait() and time.monotonic() < deadline:
                futures.wait([asked], _PATIENCE_SECONDS)
            value: str | None = answer_of(asked, 0)[name].value
        except (KafkaException, TimeoutError):
            return None
        return value
