"""Creates the two topics of coordination if they are missing, and refuses them if their form breaks a promise."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType, TopicDescription

from outbox_plugin.adapters.kafka_clients import (
    REQUEST_TIMEOUT_SECONDS,
    UNKNOWN_TOPIC,
    answer_of,
    connection_error,
    is_topic_name,
)
from outbox_plugin.coordination.group_view import TopicForm
from outbox_plugin.errors import LogUnavailable, UserError
from outbox_plugin.settings import Settings

PARTITIONS = 8
STATE_SUFFIX = "-state"
# The log has the broker's times, so all instances agree on what is late and what is stale.
_BROKER_TIME = {"message.timestamp.type": "LogAppendTime"}
TOPIC_CONFIG = {**_BROKER_TIME, "cleanup.policy": "delete", "retention.ms": "86400000", "segment.ms": "3600000"}
STATE_CONFIG = {**_BROKER_TIME, "cleanup.policy": "compact", "segment.ms": "3600000", "segment.bytes": "16777216"}
APPEAR_SECONDS = 120.0  # A broker that makes thousands of partitions shows a new topic once they are made.
CHECKED = ("message.timestamp.type", "cleanup.policy")
SHORTEST_RETENTION_SECONDS = 3_600.0
_LONGEST_NAME = 249 - len(STATE_SUFFIX)  # Kafka's limit, for the name of the state topic.


def check_name(topic: str) -> None:
    """Raises UserError unless Kafka allows the name of the coordination topic, and that of its state topic."""
    if not (is_topic_name(topic) and is_topic_name(topic + STATE_SUFFIX)):
        raise UserError(
            f"coordination topic: expected a name of 1 to {_LONGEST_NAME} letters, digits, dots, dashes and "
            f"underscores (given: {topic!r})"
        )


def ensure_topics(admin: AdminClient, topic: str, settings: Settings) -> dict[str, TopicForm]:
    """Create the coordination topic and its state topic if they are missing, and describe both.

    Args:
        admin: a client of the cluster.
        topic: the coordination topic; its state topic is named after it.
        settings: which Kafka.

    Raises:
        UserError: one has a form that would break a promise.
        ServerRefused: we may not.
        LogUnavailable: Kafka is away.
    """
    wanted = {topic: (PARTITIONS, TOPIC_CONFIG), topic + STATE_SUFFIX: (1, STATE_CONFIG)}
    deadline = time.monotonic() + APPEAR_SECONDS
    try:
        while True:
            found = found_of(describe(admin, wanted))
            if len(found) == len(wanted):
                break
            if time.monotonic() > deadline:
                raise LogUnavailable(f"Kafka: the topic {topic} was created, and does not appear")
            missing = [
                NewTopic(name, partitions, config=config)
                for name, (partitions, config) in wanted.items()
                if name not in found
            ]
            for made in admin.create_topics(missing).values():
                with suppress(TimeoutError):
                    _raise_unless_made(made.exception(REQUEST_TIMEOUT_SECONDS))
    except KafkaException as error:
        raise connection_error(error.args[0], settings) from None
    _check_config(admin, {name: config for name, (_, config) in wanted.items()})
    return found


def _raise_unless_made(error: BaseException | None) -> None:
    if isinstance(error, KafkaException) and error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
        raise KafkaException(*error.args)


def describe(admin: AdminClient, topics: Collection[str]) -> dict[str, Future[TopicDescription]]:
    """Request the descriptions of `topics`, without waiting."""
    asked: dict[str, Future[TopicDescription]] = admin.describe_topics(
        TopicCollection(list(topics)), request_timeout=REQUEST_TIMEOUT_SECONDS
    )
    return asked


def found_of(asked: Mapping[str, Future[TopicDescription]]) -> dict[str, TopicForm]:
    """Wait for the answers, and return the forms of the topics that exist.

    Raises:
        KafkaException: Kafka is away, or we may not ask.
    """
    found = {}
    for topic, answer in asked.items():
        try:
            described = answer_of(answer, REQUEST_TIMEOUT_SECONDS + 1)  # Later than the request's own limit.
        except KafkaException as error:
            if error.args[0].code() not in UNKNOWN_TOPIC:
                raise
            continue
        if described.partitions:
            found[topic] = TopicForm(len(described.partitions), _name(described))
    return found


def _name(described: TopicDescription) -> str:
    """The topic's id, in a form that messages can contain: without `/`."""
    return str(described.topic_id).replace("/", "_")


def _check_config(admin: AdminClient, wanted: Mapping[str, Mapping[str, str]]) -> None:
    """Raises UserError for a setting that breaks a promise. Raises nothing if we may not read the settings."""
    resources = {ConfigResource(ResourceType.TOPIC, topic): topic for topic in wanted}
    asked = admin.describe_configs(list(resources), request_timeout=REQUEST_TIMEOUT_SECONDS)
    for resource, answer in asked.items():
        topic = resources[resource]
        try:
            config = answer_of(answer, REQUEST_TIMEOUT_SECONDS)
        except (KafkaException, TimeoutError):
            continue
        for name in CHECKED:
            if config[name].value != wanted[topic][name]:
                raise UserError(
                    f"the topic {topic} has {name}={config[name].value}; expected {wanted[topic][name]}: set it, or "
                    "let another topic be made"
                )
        kept_ms = int(config["retention.ms"].value)
        if "retention.ms" in wanted[topic] and 0 <= kept_ms < SHORTEST_RETENTION_SECONDS * 1000:
            raise UserError(f"the topic {topic} has retention.ms={kept_ms}; expected 3600000 (an hour) or more")
