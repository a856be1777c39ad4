"""Keys and values that a schema registry's serializers make.

A serializer asks the registry when it first uses a schema, and keeps the answer. The registry's client sets no time-out
unless it is configured with one, and tries several times. So each call runs on a thread of its own, with a deadline.
A call that misses it keeps its thread, and often a lock of the serializer, until the client gives up. So a client
without a time-out gets one, and a serializer has few overdue calls at a time.

An error that the registry's client raises is the registry's. It may quote what was sent, such as a token, or what was
received, such as a proxy's page. So it is named, but not quoted. The registry's reason for refusing a schema is passed
on, without credentials. Other errors are the event's. Nothing tells a value that does not fit from a fault in a
function that the user gave to the serializer, so the serializer's error stays the cause of ours.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from outbox_plugin.emit.event import Event
from outbox_plugin.emit.row_encoder import Serializer
from outbox_plugin.errors import InvalidEvent, OutboxError, RegistryUnavailable, ServerRefused, UserError
from outbox_plugin.printable import printable
from outbox_plugin.threads.calls_with_deadline import CallOverdue, CallsWithDeadline

if TYPE_CHECKING:
    from confluent_kafka.serialization import MessageField, SerializationContext

# The client tries four times, with pauses of 1, 2 and 4 seconds at most: a registry that refuses connections is tried
# as often, and a caller's transaction does not wait much longer.
REGISTRY_SECONDS = 10.0
_UNAUTHORIZED = (401, 403, 407)
_RETRIABLE = (408, 429)
_NO_SUCH_PAGE = (404, 405)  # The codes of a path that the registry does not have. One for a schema is 40401 or more.
_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_LIBRARIES = ("confluent_kafka", "fastavro", "google", "jsonschema")  # What serializers check values with.
_CREDENTIALS = re.compile(r"(?<=//)\S*@|(?<=\bbasic )\S+|(?<=\bbearer )\S+", re.IGNORECASE)
_REASON_CHARACTERS = 1_000


def registered(serialize: Callable[[Any, SerializationContext], bytes | None]) -> Serializer:
    """Make an outbox serializer of a schema registry's serializer.

    Example: `Outbox(serializer=registered(AvroSerializer(SchemaRegistryClient({"url": …}), schema)))`, with the extra
    `outbox-plugin[schema-registry]` installed. The serializer gets a pydantic value as a dict, with aliases for keys; a
    `JSONSerializer` gets the dict that its JSON stands for. A tombstone stays one.

    Before it has run a statement, `emit` raises `InvalidEvent` for a value that does not fit the schema, and for a
    schema that the registry refuses; `RegistryUnavailable` for a registry that has not answered after 10 seconds, or
    that answers otherwise than a schema registry does; and `ServerRefused` for one that wants other credentials.

    A registry's client that has no time-out gets one of 10 seconds for each answer.
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
        _limit_waiting(serialize)
        self._serialize = serialize
        self._field = field
        self._message_field = message_field
        self._wants_json = _is_for_json(serialize)
        self._calls = CallsWithDeadline("the schema registry", "outbox-serializer")
        self._known_topics: set[str] = set()  # Their events need no registry, so overdue calls do not hold them up.

    def __call__(self, topic: str, body: Any, as_json: Callable[[], Any]) -> bytes:
        from confluent_kafka.serialization import SerializationContext

        context = SerializationContext(topic, self._message_field, [])
        try:
            if isinstance(body, BaseModel):
                body = as_json() if self._wants_json else body.model_dump(by_alias=True)
            serialized = self._in_time(topic, lambda: self._serialize(body, context))
        except OutboxError:
            raise
        except Exception as error:  # Serializers raise whatever their libraries raise.
            for each in _causes(error):  # Rules wrap the errors of the client that they ask for keys.
                if (function := _function_of_client(each)) is not None:
                    raise self._of_registry(each, function) from None
            if isinstance(error, RecursionError):
                raise InvalidEvent(self._field, "it is nested too deeply") from None
            if isinstance(error, _MISFITS) or _is_of_library(error):
                raise InvalidEvent(self._field, _reason(error)) from error
            raise
        if serialized is None:
            raise InvalidEvent(self._field, "the serializer returned nothing")
        if not isinstance(serialized, bytes):
            raise InvalidEvent(self._field, f"the serializer returned no bytes, but {type(serialized).__name__}")
        if context.headers:
            raise UserError(
                "the serializer writes headers, which the outbox does not take from it: leave its option "
                "schema.id.serializer unset, so that the number of the schema is in the bytes"
            )
        return serialized

    def _in_time(self, topic: str, call: Callable[[], bytes | None]) -> bytes | None:
        try:
            serialized = self._calls.result(call, REGISTRY_SECONDS, is_limited=topic not in self._known_topics)
        except CallOverdue as overdue:
            self._known_topics.discard(topic)
            raise RegistryUnavailable(str(overdue)) from None
        self._known_topics.add(topic)
        return serialized

    def _of_registry(self, error: BaseException, function: str) -> Exception:
        """The error to raise for one that the registry's client raised in `function`."""
        from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError

        if isinstance(error, SchemaRegistryError):
            return self._of_status(error.http_status_code, error.error_code, error.error_message)
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            return RegistryUnavailable("the schema registry answered what is no JSON")
        if isinstance(error, OAuthTokenError):
            return RegistryUnavailable(f"no token for the schema registry: {_name(error.__context__ or error)}")
        if isinstance(error, _errors_of_http("NetworkError")):
            return RegistryUnavailable(f"the schema registry cannot be reached: {_reason(error)}")
        if isinstance(error, _errors_of_http("HTTPError")):
            return RegistryUnavailable(f"the schema registry cannot be reached: {_name(error)}")
        return RegistryUnavailable(
            f"the schema registry's client cannot ask it, or cannot use its answer: {_name(error)} in {function}"
        )

    def _of_status(self, status: int, code: Any, message: Any) -> Exception:
        """The error to raise for an answer that is an error.

        Args:
            status: of the answer.
            code: the registry's code of the error; -1 or None if the answer is not the registry's.
            message: the registry's.
        """
        is_of_registry = isinstance(code, int) and code > 0
        said = f"HTTP status {status}, code {code}" if is_of_registry else f"HTTP status {status}"
        if status in _UNAUTHORIZED:
            return ServerRefused(f"the schema registry refuses us ({said})")
        if status in _RETRIABLE or status >= 500:
            return RegistryUnavailable(f"the schema registry failed ({said})")
        if not is_of_registry or code in _NO_SUCH_PAGE:
            return RegistryUnavailable(f"no schema registry answers at its address ({said})")
        reason = _CREDENTIALS.sub("***", _in_one_line(str(message)))
        return InvalidEvent(self._field, f"the schema registry refuses its schema: {reason} ({said})")


def _limit_waiting(serialize: Callable[..., Any]) -> None:
    """Give the registry's client a time-out if it has none.

    A serializer registers one schema at a time. A call that never returned would keep it from ever registering another
    one, even after the registry is back. The client takes a time-out only when it is made, so its session gets it.
    """
    session: Any = serialize
    for name in ("_registry", "_rest_client", "session"):
        session = getattr(session, name, None)
    if getattr(getattr(session, "timeout", None), "read", 0) is None:
        session.timeout = REGISTRY_SECONDS


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _function_of_client(error: BaseException) -> str | None:
    """The innermost function of the registry's client that the error went through, if it did.

    `SchemaId` counts as the client's: it holds the number of a schema from the registry's answer, and is the first to
    notice that it is no number.
    """
    function = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        is_client = module.endswith("schema_registry_client") or code.co_qualname.startswith("SchemaId.")
        if is_client and module.startswith("confluent_kafka.schema_registry."):
            function = code.co_name
    return function


def _is_of_library(error: Exception) -> bool:
    """Whether the error is of a library that serializers check values with."""
    return any(each.__module__.partition(".")[0] in _LIBRARIES for each in type(error).__mro__)


def _errors_of_http(name: str) -> tuple[type[Exception], ...]:
    """The errors of that name in the HTTP library that the registry's client uses, which has had two names."""
    errors: list[type[Exception]] = []
    for library in ("httpx", "httpx2"):
        try:
            errors.append(getattr(__import__(library), name))
        except ImportError:
            continue
    return tuple(errors)


def _reason(error: BaseException) -> str:
    """What the error, or what it was raised from, says in one line.

    An error that says only which key or index is missing is named, too.
    """
    error = next((each for each in _causes(error) if str(each)), error)
    said = _in_one_line(str(error))
    return f"{_name(error)}: {said}" if isinstance(error, LookupError) or not said else said


def _in_one_line(said: str) -> str:
    first = printable(next(iter(said.strip().splitlines()), ""))
    return first if len(first) <= _REASON_CHARACTERS else f"{first[:_REASON_CHARACTERS]}…"


def _name(error: BaseException) -> str:
    return type(error).__name__


def _is_for_json(serialize: Callable[..., Any]) -> bool:
    try:
        from confluent_kafka.schema_registry.json_schema import JSONSerializer
    except ImportError:
        return False
    return isinstance(serialize, JSONSerializer)
