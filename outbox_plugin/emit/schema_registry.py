"""Keys and values that a schema registry's serializers make.

A serializer asks the registry when it first uses a schema, and keeps the answer. The registry's client sets no time-out
unless it is configured with one, and tries several times. So each call runs on a thread of its own, with a deadline.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from outbox_plugin.emit.encoding import Serializer
from outbox_plugin.emit.event import Event
from outbox_plugin.errors import InvalidEvent, RegistryUnavailable, ServerRefused

if TYPE_CHECKING:
    from confluent_kafka.serialization import MessageField, SerializationContext

# The client tries four times, with pauses of 1, 2 and 4 seconds at most: a registry that refuses connections is tried
# as often, and a caller's transaction does not wait much longer.
REGISTRY_SECONDS = 10.0
_UNAUTHORIZED = (401, 403)
_RETRIABLE = (408, 429)


def registered(serialize: Callable[[Any, SerializationContext], bytes | None]) -> Serializer:
    """Make an outbox serializer of a schema registry's serializer.

    Example: `Outbox(serializer=registered(AvroSerializer(SchemaRegistryClient({"url": …}), schema)))`, with the extra
    `outbox-plugin[schema-registry]` installed. The serializer gets a pydantic value as a dict, with aliases for keys; a
    `JSONSerializer` gets the dict that its JSON stands for. A tombstone stays one.

    Before it has run a statement, `emit` raises `InvalidEvent` for a value that does not fit the schema, and for a
    schema that the registry refuses; `RegistryUnavailable` for a registry that has not answered after 10 seconds; and
    `ServerRefused` for one that wants other credentials.
    """
    from confluent_kafka.serialization import MessageField

    serialized = _Serialized(serialize, "value", MessageField.VALUE)
    return lambda event: None if event.value is None else serialized(event.topic, event.value, _json_of_value(event))


def registered_key(serialize: Callable[[Any, SerializationContext], bytes | None]) -> Callable[[str, Any], bytes]:
    """Make a function of a topic and a key, which returns the key's bytes, of a schema registry's serializer.

    Example: with `avro_key = registered_key(AvroSerializer(registry, key_schema))`,
    `Event(topic="orders", key=avro_key("orders", {"id": 17}), value=…)`. Events of equal bytes are in order. The bytes
    begin with the number of the schema: after a new version of it, the same key is another one for Kafka, too.

    The function raises what `emit` raises for a value.
    """
    from confluent_kafka.serialization import MessageField

    serialized = _Serialized(serialize, "key", MessageField.KEY)
    return lambda topic, key: serialized(topic, key, lambda: key.model_dump(mode="json", by_alias=True))


def _json_of_value(event: Event) -> Callable[[], Any]:
    return lambda: json.loads(event.value_text() or "")


class _Serialized:
    """Calls the serializer in time, and says what was wrong in one of our errors."""

    def __init__(
        self, serialize: Callable[[Any, SerializationContext], bytes | None], field: str, message_field: MessageField
    ) -> None:
        self._serialize = serialize
        self._field = field
        self._message_field = message_field
        self._wants_json = _is_for_json(serialize)

    def __call__(self, topic: str, body: Any, as_json: Callable[[], Any]) -> bytes:
        from confluent_kafka.serialization import SerializationContext

        if isinstance(body, BaseModel):
            body = as_json() if self._wants_json else body.model_dump(by_alias=True)
        context = SerializationContext(topic, self._message_field)
        try:
            serialized = _in_time(lambda: self._serialize(body, context))
        except Exception as error:  # Serializers raise whatever their libraries raise.
            raise self._judged(error) from None
        if serialized is None:
            raise InvalidEvent(self._field, "the serializer returned nothing")
        return serialized

    def _judged(self, error: Exception) -> Exception:
        from confluent_kafka.serialization import SerializationError

        if isinstance(error, json.JSONDecodeError):
            return RegistryUnavailable(f"the schema registry answered what is no JSON: {error}")
        if isinstance(error, SerializationError | ValueError | TypeError | AttributeError | LookupError):
            return InvalidEvent(self._field, str(error))
        if isinstance(error, _transport_errors()):
            return RegistryUnavailable(f"the schema registry cannot be reached: {error or type(error).__name__}")
        try:
            from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError
        except ImportError:  # Without the extra, no client of a registry can have raised the error.
            return error
        if isinstance(error, OAuthTokenError):
            return RegistryUnavailable(f"no token for the schema registry: {error}")
        if not isinstance(error, SchemaRegistryError):
            return error
        if error.http_status_code in _UNAUTHORIZED:
            return ServerRefused(f"the schema registry refuses us: {error}")
        if error.http_status_code in _RETRIABLE or error.http_status_code >= 500:
            return RegistryUnavailable(f"the schema registry failed: {error}")
        return InvalidEvent(self._field, f"the schema registry refuses its schema: {error}")


def _in_time(call: Callable[[], bytes | None]) -> bytes | None:
    """The call's result, or its exception.

    Raises:
        RegistryUnavailable: it took too long. Its thread goes on alone, and what it returns is dropped.
    """
    results: list[bytes | None] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # The caller raises it.
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), name="outbox-serializer", daemon=True)
    thread.start()
    thread.join(REGISTRY_SECONDS)
    if errors:
        raise errors[0]
    if not results:
        raise RegistryUnavailable(f"the schema registry did not answer within {REGISTRY_SECONDS:g} seconds")
    return results[0]


def _transport_errors() -> tuple[type[Exception], ...]:
    """The errors of the HTTP library that the registry's client uses, which has had two names."""
    errors: list[type[Exception]] = []
    for name in ("httpx", "httpx2"):
        try:
            errors.append(__import__(name).HTTPError)
        except ImportError:
            continue
    return tuple(errors)


def _is_for_json(serialize: Callable[..., Any]) -> bool:
    try:
        from confluent_kafka.schema_registry.json_schema import JSONSerializer
    except ImportError:
        return False
    return isinstance(serialize, JSONSerializer)
