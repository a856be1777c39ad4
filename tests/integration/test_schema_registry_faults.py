"""A schema registry that misbehaves, and serializers that fail: who is named as the cause, and what is not shown.

The registry is a server of the tests that speaks the real protocol, to the real client.
"""

from __future__ import annotations

import importlib
import json
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from confluent_kafka.schema_registry import (
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    header_schema_id_serializer,
    topic_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import SerializationError
from pydantic import BaseModel

from outbox_plugin import Event
from outbox_plugin.emit import schema_registry
from outbox_plugin.encoding import registered, registered_key
from outbox_plugin.errors import InvalidEvent, OutboxError, RegistryUnavailable, ServerRefused, UserError
from outbox_plugin.threads.calls_with_deadline import MAX_OVERDUE_CALLS
from tests import schema_registry as server
from tests.schema_registry import Registry, a_registry
from tests.support import eventually

pytestmark = pytest.mark.integration

PASSWORD = "s3cret"
AVRO = '{"type": "record", "name": "Order", "fields": [{"name": "total", "type": "long"}]}'
ORDER = {"total": 12}
BY_TOPIC = {"subject.name.strategy": topic_subject_name_strategy}
# A message with required fields. Its module has no types.
NAME_PART: Any = importlib.import_module("google.protobuf.descriptor_pb2").UninterpretedOption.NamePart
_clients: list[ExitStack] = []  # The test's, which are closed at its end.


@pytest.fixture
def registry() -> Iterator[Registry]:
    with ExitStack() as clients, a_registry() as registry:
        _clients.append(clients)
        yield registry
        registry.closing.set()
        eventually(lambda: not waiting_threads(), 30)
        _clients.clear()


def waiting_threads() -> int:
    return sum(thread.name == "outbox-serializer" for thread in threading.enumerate())


def client_of(registry: Registry, **options: Any) -> SchemaRegistryClient:
    """A client that tries once, with the password in its URL unless the options say otherwise."""
    options = {name.replace("_", "."): value for name, value in options.items()}
    url = registry.url.replace("//", f"//alice:{PASSWORD}@")
    client = SchemaRegistryClient({"url": url, "max.retries": 0, **options})
    _clients[-1].callback(client.close)
    return client


def avro(client: SchemaRegistryClient, schema: str | None = AVRO, **options: Any) -> Callable[..., Any]:
    conf = {**BY_TOPIC, **{name.replace("_", "."): value for name, value in options.items()}}
    return registered(AvroSerializer(client, schema, conf=conf))


def order(value: Any = ORDER, topic: str = "t") -> Event:
    return Event(topic=topic, key="k", value=value)


def raised_by(serialize: Callable[[Event], Any], event: Event) -> OutboxError:
    """The error, of which neither the text nor the traceback shows the password."""
    with pytest.raises(OutboxError) as caught:
        serialize(event)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def answer(status: int, content: Any) -> Callable[[Mapping[str, str]], tuple[int, bytes]]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda headers: (status, body)


def refusal(status: int, code: int, message: str = "told to fail") -> Callable[[Mapping[str, str]], tuple[int, bytes]]:
    return answer(status, {"error_code": code, "message": message})


@pytest.mark.parametrize(
    "answering",
    [
        answer(200, b""),
        answer(200, [1]),
        answer(200, "hello"),
        answer(200, {"status": "ok"}),
        answer(200, {"id": "seven"}),
        answer(200, {"id": 2**40}),
        answer(200, {"id": [1]}),
        answer(200, {"id": 1, "references": 5}),
        answer(200, b'{"id": 1, "subject": "\xe9"}'),
        answer(200, b'{"id": 1, "sub'),
        answer(200, b"[" * 100_000),
        answer(302, b""),
        answer(404, b"<html>\n<h1>no such page</h1></html>"),
        answer(404, {"error": "no route"}),
        answer(409, b"<html>conflict</html>"),
        answer(422, []),
        refusal(404, 404),
        refusal(405, 405),
        refusal(429, 429),
        refusal(500, 50001),
    ],
)
def test_an_answer_of_no_schema_registry_is_not_the_events_fault(
    registry: Registry, answering: Callable[[Mapping[str, str]], tuple[int, bytes]]
) -> None:
    registry.answering = answering
    assert type(raised_by(avro(client_of(registry)), order())) is RegistryUnavailable


@pytest.mark.parametrize("status", [401, 403, 407])
def test_a_registry_that_refuses_us(registry: Registry, status: int) -> None:
    registry.answering = answer(status, b"<html>who are you?</html>")
    assert isinstance(raised_by(avro(client_of(registry)), order()), ServerRefused)


@pytest.mark.parametrize(("status", "code"), [(404, 40401), (409, 409), (422, 42201)])
def test_a_schema_that_the_registry_refuses_is_the_events_fault(registry: Registry, status: int, code: int) -> None:
    registry.answering = refusal(status, code, "the field\x1b total\nis gone")
    error = raised_by(avro(client_of(registry)), order())
    assert isinstance(error, InvalidEvent)
    assert str(error).startswith("event value: the schema registry refuses its schema: the field\\x1b total")


def test_a_reason_of_five_megabytes_is_cut_short(registry: Registry) -> None:
    registry.answering = refusal(422, 42201, f"{'x' * 5_000_000} at //alice:{PASSWORD}@registry")
    assert len(str(raised_by(avro(client_of(registry)), order()))) < 1_200


def test_a_schema_of_five_megabytes_is_registered(registry: Registry) -> None:
    schema = json.dumps({**json.loads(AVRO), "doc": "x" * 5_000_000})
    assert avro(client_of(registry), schema)(order())


def test_a_latest_version_that_refers_to_a_schema_that_is_gone(registry: Registry) -> None:
    refers = Schema(AVRO, "AVRO", [SchemaReference("shop.Money", "money-value", 1)])
    client = client_of(registry)
    client.register_schema("t-value", refers)
    error = raised_by(avro(client, None, auto_register_schemas=False, use_latest_version=True), order())
    assert isinstance(error, InvalidEvent)
    assert "Subject 'money-value' not found" in str(error)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500])
@pytest.mark.parametrize("of_registry", [False, True], ids=["a page", "an error of the registry"])
def test_an_answer_that_quotes_the_request_is_not_shown(registry: Registry, status: int, of_registry: bool) -> None:
    """Some proxies and debug pages show the headers that they got."""
    quoted: list[str] = []

    def quote(headers: Mapping[str, str]) -> tuple[int, bytes]:
        quoted.append(headers["Authorization"].split()[1])
        text = f"{dict(headers)} at {registry.url.replace('//', f'//alice:{PASSWORD}@')}"
        message = {"error_code": 40901, "message": text}
        return status, json.dumps(message).encode() if of_registry else text.encode()

    registry.answering = quote
    error = raised_by(avro(client_of(registry)), order())
    assert quoted
    assert quoted[0] not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("token", [f"{PASSWORD}\n", f"{PASSWORD}ü"])
def test_a_token_that_is_no_header_is_not_shown(registry: Registry, token: str) -> None:
    """The HTTP library quotes the header that it refuses, such as a token that was read with its file's newline."""
    client = client_of(
        registry,
        url=registry.url,
        bearer_auth_credentials_source="STATIC_TOKEN",
        bearer_auth_token=token,
        bearer_auth_logical_cluster="c",
    )
    assert isinstance(raised_by(avro(client), order()), RegistryUnavailable)


def test_a_token_that_is_not_to_be_had(registry: Registry) -> None:
    """The error of the OAuth library quotes the URL that it asked."""
    registry.answering = answer(500, b"")
    client = client_of(
        registry,
        url=registry.url,
        bearer_auth_credentials_source="OAUTHBEARER",
        bearer_auth_client_id="me",
        bearer_auth_client_secret=PASSWORD,
        bearer_auth_scope="s",
        bearer_auth_issuer_endpoint_url=registry.url.replace("//", f"//alice:{PASSWORD}@"),
        bearer_auth_logical_cluster="c",
        bearer_auth_identity_pool_id="p",
    )
    _clients[-1].enter_context(client._rest_client.bearer_field_provider.client)  # The client does not close it.
    error = raised_by(avro(client), order())
    assert (type(error), str(error)) == (
        RegistryUnavailable,
        "no token for the schema registry: HTTPStatusError",
    )


def test_a_function_for_tokens_that_fails(registry: Registry) -> None:
    def token(_: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError(f"the vault at https://me:{PASSWORD}@vault is sealed")

    client = client_of(
        registry,
        url=registry.url,
        bearer_auth_credentials_source="CUSTOM",
        bearer_auth_custom_provider_function=token,
        bearer_auth_custom_provider_config={},
    )
    error = raised_by(avro(client), order())
    assert isinstance(error, RegistryUnavailable)
    assert str(error).endswith("RuntimeError in get_bearer_fields")


def test_a_password_that_breaks_the_url_is_not_shown(registry: Registry) -> None:
    client = client_of(registry, url=registry.url.replace("//", f"//alice:{PASSWORD}/@"))
    assert isinstance(raised_by(avro(client), order()), RegistryUnavailable)


def test_a_registry_that_hangs_keeps_few_threads_and_no_known_topic(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer never ends, so no time-out of the client does either."""
    serialize = avro(client_of(registry))
    known = serialize(order(topic="known"))
    registry.trickling.set()
    monkeypatch.setattr(schema_registry, "REGISTRY_SECONDS", 0.05)
    problems = [str(raised_by(serialize, order())) for _ in range(3 * MAX_OVERDUE_CALLS)]
    monkeypatch.undo()
    assert waiting_threads() == MAX_OVERDUE_CALLS
    assert problems[0].endswith("did not answer within 0.05 seconds")
    assert problems[-1].endswith(f"has not answered {MAX_OVERDUE_CALLS} earlier calls, which still wait")
    assert serialize(order(topic="known")) == known
    registry.trickling.clear()
    eventually(lambda: not waiting_threads(), 30)
    assert serialize(order()) == known


def test_a_topic_whose_schema_is_asked_for_again_is_known_no_more(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest version of a schema is kept for a time only: calls for a topic that was served can hang later."""
    client = client_of(registry, cache_latest_ttl_sec=0)
    avro(client)(order())
    serialize = avro(client, auto_register_schemas=False, use_latest_version=True)
    serialize(order())
    registry.trickling.set()
    monkeypatch.setattr(schema_registry, "REGISTRY_SECONDS", 0.05)
    for _ in range(3 * MAX_OVERDUE_CALLS):
        raised_by(serialize, order())
    monkeypatch.undo()
    assert waiting_threads() == MAX_OVERDUE_CALLS
    registry.trickling.clear()


def test_a_registry_that_was_silent_serves_again(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the client has no time-out, and the call that got no answer holds a lock of the serializer."""
    monkeypatch.setattr(server, "SILENCE_SECONDS", 3600.0)
    monkeypatch.setattr(schema_registry, "REGISTRY_SECONDS", 1.0)
    serialize = avro(client_of(registry))
    registry.silent.set()
    raised_by(serialize, order())
    registry.silent.clear()

    def is_served() -> bool:
        try:
            return bool(serialize(order()))
        except RegistryUnavailable:
            return False

    eventually(is_served, 10)


def test_a_time_out_of_the_client_stays(registry: Registry) -> None:
    client = client_of(registry, timeout=77)
    avro(client)
    assert client._rest_client.session.timeout.read == 77


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def json_of(properties: dict[str, Any]) -> Callable[[SchemaRegistryClient], Any]:
    schema = json.dumps({"title": "Order", "type": "object", "properties": properties})
    return lambda client: JSONSerializer(schema, client, conf=BY_TOPIC)


def avro_of(schema: str) -> Callable[[SchemaRegistryClient], Any]:
    return lambda client: AvroSerializer(client, schema, conf=BY_TOPIC)


def protobuf(client: SchemaRegistryClient) -> Any:
    return ProtobufSerializer(NAME_PART, client, conf=BY_TOPIC)


@pytest.mark.parametrize(
    ("serializer", "value"),
    [
        (avro_of(AVRO), {"total": 2**70}),
        (avro_of('"double"'), 10**400),
        (json_of({"a": {"$ref": "#"}}), nested(100_000)),
        (json_of({"a": {"type": "integer"}}), nested(100_000)),
        (json_of({"a": {"$ref": "nowhere.json"}}), {"a": 1}),
        (json_of({"a": {"type": "intger"}}), {"a": 1}),
        (protobuf, NAME_PART()),
    ],
    ids=["long", "double", "deep", "deep misfit", "reference", "schema", "required field"],
)
def test_what_a_serializer_refuses_is_the_events_fault(
    registry: Registry, serializer: Callable[[SchemaRegistryClient], Any], value: Any
) -> None:
    error = raised_by(registered(serializer(client_of(registry))), order(value))
    assert isinstance(error, InvalidEvent)
    assert error.field == "value"


class Key(BaseModel):
    of: Any


def test_a_model_that_is_no_key(registry: Registry) -> None:
    ring = Key(of=None)
    ring.of = ring
    key = registered_key(json_of({})(client_of(registry)))
    for wrong in (ring, Key(of=object()), Key(of=nested(100_000))):
        with pytest.raises(InvalidEvent) as caught:
            key("t", wrong)
        assert caught.value.field == "key"


def test_the_users_functions_are_found_in_the_traceback(registry: Registry) -> None:
    """Nothing tells their faults from a value that does not fit. What cannot be such a value is raised unchanged."""

    def wrong_for_it(value: Any, _: Any) -> bytes:
        return bytes(value.total)

    def wrong(_: Any, __: Any) -> bytes:
        raise NotImplementedError("not yet")

    def wants_a_field(value: Any, _: Any) -> bytes:
        return bytes(value["of"])

    def breaks_a_rule(value: Any, _: Any) -> bytes:
        raise SerializationError() from ValueError("a total is positive")

    error = raised_by(registered(wrong_for_it), order())
    assert isinstance(error, InvalidEvent)
    assert "wrong_for_it" in "".join(traceback.format_exception(error))
    with pytest.raises(NotImplementedError):
        registered(wrong)(order())
    assert str(raised_by(registered(wants_a_field), order())) == "event value: KeyError: 'of'"
    assert str(raised_by(registered(breaks_a_rule), order())) == "event value: a total is positive"


def test_a_rule_that_asks_the_registry_in_vain(registry: Registry) -> None:
    """As rules that encrypt fields do: their error wraps the client's."""
    client = client_of(registry)
    registry.failing = 503

    def encrypts(_: Any, __: Any) -> bytes:
        try:
            client.get_subjects()
        except Exception as error:
            raise SerializationError() from error
        return b""

    assert isinstance(raised_by(registered(encrypts), order()), RegistryUnavailable)


@pytest.mark.parametrize("returned", ["text", 5, bytearray(b"x")])
def test_a_serializer_returns_bytes(returned: Any) -> None:
    with pytest.raises(InvalidEvent, match=f"no bytes, but {type(returned).__name__}"):
        registered(lambda value, context: returned)(order())


def test_a_serializer_that_ends_the_program_is_no_registry_that_is_away() -> None:
    def end(_: Any, __: Any) -> bytes:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        registered(end)(order())


def test_numbers_of_schemas_in_headers_are_refused(registry: Registry) -> None:
    """The record would lack them, and no consumer could read it."""
    registry.answering = answer(200, {"id": 1, "guid": "89791762-2336-4186-9674-299b90a802e2"})
    serialize = avro(client_of(registry), schema_id_serializer=header_schema_id_serializer)
    error = raised_by(serialize, order())
    assert type(error) is UserError
    assert "schema.id.serializer" in str(error)
