"""Kafka clients as this package configures them, and librdkafka's errors in our words."""

from __future__ import annotations

import logging
import re
import threading
from concurrent.futures import Future
from operator import methodcaller
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

from outbox_plugin.adapters.kafka_tokens import TokenCallback, token_provider
from outbox_plugin.core.signing import Headers
from outbox_plugin.errors import Fenced, InvalidSetting, LogUnavailable, OutcomeUnknown, ServerRefused, TermEnded
from outbox_plugin.settings import Settings

DEFAULT_LARGEST_RECORD_BYTES = 1_000_000  # librdkafka's own.
REQUEST_TIMEOUT_SECONDS = 10.0
# A new client's second connection waits for half of this. librdkafka's default is 100.
_RECONNECT_BACKOFF_MS = 20
_LINGER_MS = 5  # Batches fill while a window is produced. A flush ends the wait.
_CLOSE_SECONDS = 5.0
REACH_SECONDS = 5.0  # How long a start waits for a broker's answer.
# librdkafka's own log lines. They are not shown unless somebody sets the level of this logger.
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

_OTHER_NAMES = {"linger.ms": "queue.buffering.max.ms", "message.timeout.ms": "delivery.timeout.ms"}  # librdkafka's.

_TOPIC_NAME = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}")
FORBIDDEN_TOPIC = {KafkaError.TOPIC_EXCEPTION, KafkaError.TOPIC_AUTHORIZATION_FAILED}
UNKNOWN_TOPIC = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}
# A partition that is new, or moves to another broker, gives these answers until all brokers know its leader.
NO_LEADER_YET = {
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
}

T = TypeVar("T")


def client_config(settings: Settings, **ours: Any) -> dict[str, Any]:
    """A librdkafka configuration: ours (dots written as underscores), and the user's laid over it.

    It is for one client: where OUTBOX_KAFKA_TOKEN_PROVIDER is set, it holds the first token of that client.

    Raises:
        InvalidSetting: the token provider cannot be imported.
        LogUnavailable: it returns no token.
    """
    named = {name.replace("_", "."): value for name, value in ours.items()}
    provider = settings.kafka_token_provider
    tokens = {} if provider is None else {"oauth_cb": TokenCallback(token_provider(provider))}
    return {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": "outbox",
        "logger": LIBRARY_LOGGER,
        "reconnect.backoff.ms": _RECONNECT_BACKOFF_MS,
        **named,
        **settings.kafka,
        **tokens,
    }


def producer_config(settings: Settings, **ours: Any) -> dict[str, Any]:
    """The configuration of a producer that sends events."""
    return client_config(
        settings,
        partitioner="murmur2_random",  # Records land where Java's clients put them.
        linger_ms=_LINGER_MS,
        batch_num_messages=50_000,
        batch_size=1_000_000,
        queue_buffering_max_messages=1_000_000,
        queue_buffering_max_kbytes=262_144,
        delivery_report_only_error=True,
        **ours,
    )


def internal_client_config(settings: Settings, **required: Any) -> dict[str, Any]:
    """The configuration of a client for our own topics.

    The `required` properties (written as in `client_config`) replace the user's. None leaves a property out. The user's
    other properties apply too: they say how to reach Kafka.
    """
    named = {name.replace("_", "."): value for name, value in required.items()}
    ours = named.keys() | {_OTHER_NAMES[name] for name in named.keys() & _OTHER_NAMES.keys()}
    theirs = {name: value for name, value in client_config(settings).items() if name not in ours}
    return theirs | {name: value for name, value in named.items() if value is not None}


def largest_record_bytes(settings: Settings) -> int:
    """How many bytes a record may have at most: librdkafka's `message.max.bytes`, before any compression."""
    return int(settings.kafka.get("message.max.bytes", DEFAULT_LARGEST_RECORD_BYTES))


def compresses(settings: Settings) -> bool:
    """Whether producers compress records."""
    return any(settings.kafka.get(name, "none") != "none" for name in ("compression.type", "compression.codec"))


def answer_of(request: Future[T], timeout_seconds: float) -> T:
    """The answer to a request of an admin client.

    `Future.result` raises the exception that the future keeps. That exception would keep the frames of the call, and
    they keep the future: a cycle that stays until the garbage collector runs. So this raises an exception of its own.

    Args:
        request: what a method of the client has returned.
        timeout_seconds: how long to wait.

    Raises:
        KafkaException: Kafka refuses it, or is away.
        TimeoutError: there is no answer yet.
    """
    if (error := request.exception(timeout_seconds)) is None:
        return request.result()
    raise KafkaException(*error.args) if isinstance(error, KafkaException) else error


def close_consumer(consumer: Consumer) -> None:
    """Close a consumer, or leave it to a thread that does: while Kafka is away, it waits for the answer to a commit.

    Where the interpreter ends, there can be no new thread.
    """
    closing = threading.Thread(target=consumer.close, name="outbox-consumer-close", daemon=True)
    try:
        closing.start()
    except RuntimeError:
        consumer.close()
    else:
        closing.join(_CLOSE_SECONDS)


def check_properties(settings: Settings) -> None:
    """Check that librdkafka accepts OUTBOX_KAFKA, and that the token provider can be imported. Connects to nothing.

    Raises:
        InvalidSetting: one of them is wrong.
    """
    if settings.kafka_token_provider is not None:
        token_provider(settings.kafka_token_provider)
    kafka = {name: value for name, value in settings.kafka.items() if name != "sasl.oauthbearer.method"}
    without_tokens = settings.model_copy(update={"kafka": kafka, "kafka_token_provider": None})
    try:
        Consumer(client_config(without_tokens, group_id=settings.group)).close()
    except KafkaException as error:
        raise refused_property(error) from None


def refused_property(error: KafkaException) -> InvalidSetting:
    """What to say when librdkafka does not take a configuration."""
    return InvalidSetting(f"OUTBOX_KAFKA: {error.args[0].str()}")


def transaction_error(error: KafkaError, doing: str, *, unpublished: bool) -> TermEnded | LogUnavailable:
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


def connection_error(error: KafkaError, settings: Settings) -> ServerRefused | LogUnavailable:
    """What `error`, met at start or in a read, means: refused for good, or away for now."""
    message = f"Kafka, as OUTBOX_BOOTSTRAP_SERVERS names it ({settings.bootstrap_servers}): {error.str()}"
    return ServerRefused(message) if error.code() in _NOT_LET_IN else LogUnavailable(message)


def is_topic_name(name: str) -> bool:
    """Whether Kafka allows the name for a topic."""
    return _TOPIC_NAME.fullmatch(name) is not None


def is_group_name(group: str) -> bool:
    """Whether the client takes the name of a consumer group as it is.

    It drops white space at the beginning: the group would be that of another name. If nothing is left, it ends the
    process.
    """
    return bool(group) and not group[0].isspace()


def is_fatal(error: KafkaError) -> bool:
    """Whether a client that meets `error` does nothing any more: librdkafka marks the error, or names it so."""
    return error.fatal() or error.code() == KafkaError._FATAL


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
