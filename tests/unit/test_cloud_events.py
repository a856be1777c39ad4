"""CloudEvents of both modes, written by us and read by the SDK, and the other way round."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka, to_binary_event, to_structured_event
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import example, given
from hypothesis import strategies as st

from outbox_plugin.emit.cloud_events import CloudEventsMode
from outbox_plugin.emit.event import Event
from outbox_plugin.emit.row_encoder import MAX_RECORD_BYTES, RowEncoder, Serializer, as_bytes, as_text
from outbox_plugin.errors import InvalidEvent, UserError
from outbox_plugin.inbox.received import Received
from tests.row_records import value_and_headers

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MODES: list[CloudEventsMode] = ["binary", "structured"]
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def event(value: Any, **wanted: Any) -> Event:
    given = {"topic": "t", "key": "k", "type": "Placed", "idempotency_key": UUID(int=7), "occurred_at": NOON, **wanted}
    return Event(value=value, **given)


def written(given: Event, mode: CloudEventsMode, serializer: Serializer = as_text) -> KafkaMessage:
    """The record that an outbox's harvester would send."""
    value, headers = value_and_headers(RowEncoder(serializer, "/shop", MAX_RECORD_BYTES, mode).row(given))
    return KafkaMessage({name: body or b"" for name, body in headers}, given.key, value or b"")


def received(message: KafkaMessage, key: bytes | None = b"k") -> Received:
    return Received("t", 0, 0, 0, key, message.value, tuple(message.headers.items()), "id")


@pytest.mark.parametrize("serializer", [as_text, as_bytes])
@pytest.mark.parametrize("mode", MODES)
def test_the_sdk_and_an_inbox_read_what_an_outbox_writes(mode: CloudEventsMode, serializer: Serializer) -> None:
    placed = event({"total": 12}, content_schema="https://schemas/order", headers={"tenant": "a"})
    message = written(placed, mode, serializer)
    for read in (from_kafka(message, JSONFormat()), received(message).cloud_event()):
        assert (read.get_id(), read.get_source(), read.get_type()) == (str(UUID(int=7)), "/shop", "Placed")
        assert (read.get_time(), read.get_dataschema(), read.get_data()) == (
            NOON,
            "https://schemas/order",
            {"total": 12},
        )
        assert (read.get_datacontenttype(), read.get_extension("partitionkey")) == ("application/json", "k")
    assert message.headers["tenant"] == b"a"
    assert message.headers["idempotency-key"] == str(UUID(int=7)).encode()  # An inbox goes by it.


def test_a_structured_event_is_one_json_object() -> None:
    message = written(event({"total": 12}), "structured")
    assert json.loads(message.value) == {
        "specversion": "1.0",
        "id": str(UUID(int=7)),
        "source": "/shop",
        "type": "Placed",
        "time": "2026-01-01T12:00:00Z",
        "datacontenttype": "application/json",
        "data": {"total": 12},
    }
    assert message.headers["content-type"] == b"application/cloudevents+json"
    assert not any(name.startswith("ce_") or name == "event-type" for name in message.headers)


@given(JSON_VALUES.filter(lambda value: value is not None))
def test_structured_data_is_what_was_given(value: Any) -> None:
    data = received(written(event(json.dumps(value)), "structured")).cloud_event().get_data()
    assert data == value
    assert type(data) is type(value)


@pytest.mark.parametrize(
    ("value", "content_type", "data"),
    [
        ("NaN", "", "NaN"),
        ("no json", "", "no json"),
        ("12", "text/plain", "12"),
        (b"\xff\x00", "application/octet-stream", b"\xff\x00"),
        (b"<a/>", "application/xml", "<a/>"),
        (b"a", "application/avro", b"a"),
        (b'{"a":1}', "application/vnd.shop+json; charset=utf-8", {"a": 1}),
    ],
)
def test_structured_data_of_any_type(value: Any, content_type: str, data: Any) -> None:
    read = received(written(event(value, content_type=content_type), "structured", as_bytes)).cloud_event()
    assert read.get_data() == (data if content_type else value)


@pytest.mark.parametrize(
    "value", ['{"a":1.00000000000000000001,"a":2}', "[-0, 1.10, 1E2]", " [1]\n", '"\\ud800"', "9" * 4000]
)
@pytest.mark.parametrize("content_type", ["", "application/JSON", "application/vnd.shop_v1+json ; charset=utf-8"])
def test_structured_data_is_the_json_that_was_given(value: str, content_type: str) -> None:
    """With all digits of its numbers, and names that occur twice; a reader decides what they mean."""
    for serializer in (as_text, as_bytes):
        body = written(event(value, content_type=content_type), "structured", serializer).value
        assert body.endswith(f'"data": {value}}}'.encode())


@pytest.mark.parametrize("value", [{"a": "ä" * 400_000}, "ä" * 400_000])
def test_a_structured_event_has_hardly_more_bytes_than_its_value(value: Any) -> None:
    assert len(written(event(value), "structured").value) < 801_000


@pytest.mark.parametrize("serializer", [as_text, as_bytes])
@pytest.mark.parametrize("value", [b"", b"abc", b"\xff"])
def test_structured_bytes_stay_bytes_also_where_they_happen_to_be_a_text(value: bytes, serializer: Serializer) -> None:
    message = written(event(value, content_type="application/avro"), "structured", serializer)
    assert received(message).cloud_event().get_data() == value


def nested(depth: int) -> Any:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_data_that_is_nested_deeply_is_refused_or_stays_what_it_is() -> None:
    """How deep it may be depends on how deep the caller is."""
    refused = 0
    for depth in (*range(850, 1_000, 3), 10_000):
        text = "[" * depth + "[]" + "]" * depth
        for value in [text, nested(depth)]:
            try:
                message = written(event(value), "structured")
            except InvalidEvent as error:
                refused += 1
                assert str(error) == "event value: it is nested too deeply"  # noqa: PT017
            else:
                assert message.value.endswith(f'"data": {text}}}'.encode())
    assert refused >= 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("content_type", ["", "text/plain"])
def test_a_lone_surrogate_is_refused_in_either_mode(mode: CloudEventsMode, content_type: str) -> None:
    for value in ("\ud800", {"a": "\ud800"}):
        with pytest.raises(InvalidEvent, match="event value: not valid text: surrogates not allowed"):
            written(event(value, content_type=content_type), mode)


def test_bytes_that_are_no_text_become_base64_in_a_table_of_texts() -> None:
    _, _, value, names, *_ = RowEncoder(as_text, "/shop", MAX_RECORD_BYTES, "structured").row(event(b"\xff\x00"))
    assert isinstance(value, str)
    assert json.loads(value)["data_base64"] == "/wA="
    assert "outbox-record" not in names


def test_a_structured_tombstone_stays_one() -> None:
    _, _, value, names, *_ = RowEncoder(as_text, "/shop", MAX_RECORD_BYTES, "structured").row(event(None))
    assert value is None
    assert {"ce_id", "ce_type"} <= set(names)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_cloud_event_is_refused(mode: CloudEventsMode) -> None:
    with pytest.raises(InvalidEvent, match="event type: a CloudEvent must have one"):
        written(event("v", type=""), mode)
    with pytest.raises(UserError, match="cloud_events_mode: expected 'binary' or 'structured' \\(given: 'batched'\\)"):
        RowEncoder(as_text, "/shop", MAX_RECORD_BYTES, "batched")  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["", 7, " /shop", "a b", "a\n", "a\0", "\ud800"])
def test_a_source_that_is_none_is_refused_before_any_event(source: Any) -> None:
    with pytest.raises(UserError, match=r"cloud_events: expected a URI reference, such as '/shop/orders' \(given: "):
        RowEncoder(as_text, source, MAX_RECORD_BYTES)


@pytest.mark.parametrize("write", [to_binary_event, to_structured_event])
def test_an_inbox_reads_what_the_sdk_writes(write: Any) -> None:
    given = CloudEvent({"id": "1", "source": "/s", "type": "T", "time": NOON, "tenant": "a"}, {"a": [1]})
    read = received(write(given), key=None).cloud_event()
    assert (read.get_attributes(), read.get_data()) == (given.get_attributes(), {"a": [1]})


@pytest.mark.parametrize("mode", MODES)
def test_a_header_of_an_attribute_of_its_own_changes_nothing_of_the_event(mode: CloudEventsMode) -> None:
    read = received(written(event({"a": 1}, headers={"ce_tenant": "a"}), mode)).cloud_event()
    assert (read.get_id(), read.get_data()) == (str(UUID(int=7)), {"a": 1})
    assert read.get_extension("tenant") == ("a" if mode == "binary" else None)


def test_a_header_that_readers_would_take_for_an_attribute_is_refused() -> None:
    """One of the same letters is the event's own, and is not written twice."""
    with pytest.raises(InvalidEvent, match="'CE_id' is one of the CloudEvent's own in other letters"):
        written(event("v", headers={"CE_id": "2"}), "binary")
    with pytest.raises(InvalidEvent, match="'Content-Type' is one of"):
        written(event("v", headers={"Content-Type": "text/plain"}), "structured")
    assert written(event("v", headers={"ce_id": "2"}), "binary").headers["ce_id"] == str(UUID(int=7)).encode()


@pytest.mark.parametrize(
    ("header", "body", "problem"),
    [
        ("ce_tenant_id", "a", "should only contain lowercase letters and numbers"),
        ("CE_my-tenant", "a", "should only contain lowercase letters and numbers"),
        ("ce_", "a", "must be at least 1 character long"),
        ("ce_data", "a", "'data' is reserved"),
        ("ce_subject", "", "'subject' must not be empty"),
        ("ce_tenant", b"\xff", "must be a text in UTF-8"),
        ("ce_datacontenttype", "text/plain", "set content_type instead"),
    ],
)
def test_a_header_that_would_make_the_event_unreadable_is_refused(header: str, body: Any, problem: str) -> None:
    given: list[tuple[CloudEventsMode, Any]] = [("binary", "v"), ("structured", None)]
    for mode, value in given:
        with pytest.raises(InvalidEvent, match=f"event headers.{header}: .*{problem}"):
            written(event(value, headers=[(header, body)]), mode)


def test_a_value_in_binary_mode_is_no_event_in_structured_mode() -> None:
    with pytest.raises(
        InvalidEvent, match="event content_type: in binary mode, readers take a value of application/cl"
    ):
        written(event("{}", content_type="Application/CloudEvents+json"), "binary")
    headers = {"Content-Type": "application/cloudevents+json"}
    with pytest.raises(InvalidEvent, match="'Content-Type' is one of"):
        written(event(b"v", headers=headers), "binary", lambda event: bytes(event.value))


@pytest.mark.parametrize("mode", MODES)
def test_a_default_that_is_no_text_is_refused(mode: CloudEventsMode) -> None:
    class Placed(Event):
        topic: str = "t"
        type: str = "\ud800"

    with pytest.raises(InvalidEvent, match="event type: not valid text"):
        written(Placed(key="k", value="v"), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_time_of_any_zone_is_the_same_time(mode: CloudEventsMode) -> None:
    """RFC 3339 has no seconds in an offset; local mean times have them."""
    for offset in (timedelta(hours=5, minutes=30), timedelta(minutes=19, seconds=32), -timedelta(microseconds=1)):
        at = datetime(1890, 1, 1, 12, tzinfo=timezone(offset))
        assert received(written(event("v", occurred_at=at), mode)).cloud_event().get_time() == at
    first = datetime(1, 1, 1, tzinfo=timezone(timedelta(seconds=1)))
    with pytest.raises(InvalidEvent, match=r"event occurred_at: 0001-01-01T00:00:00\+00:00:01 is no time in UTC"):
        written(event("v", occurred_at=first), mode)


OFFSETS = st.integers(-86_399, 86_399).map(lambda seconds: timezone(timedelta(seconds=seconds)))
TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["ce_", "CE_", "", "content-", "Content-"]).flatmap(
            lambda prefix: (st.sampled_from(["id", "tenant", "type", "time", "data"]) | TEXTS).map(prefix.__add__)
        ),
        TEXTS | st.none() | st.binary(max_size=4),
    ),
    max_size=3,
)
TYPES = st.sampled_from(["", "text/plain", "application/octet-stream", "application/x+json", "application/cloudevents"])


@example("structured", as_text, "a\0b", NOON, "", "T", "", [])
@given(
    st.sampled_from(MODES),
    st.sampled_from([as_text, as_bytes]),
    JSON_VALUES | st.binary(max_size=8),
    st.datetimes(timezones=OFFSETS),
    TYPES,
    TEXTS,
    TEXTS,
    HEADERS,
)
def test_whatever_is_emitted_is_read_as_it_was_emitted(
    mode: CloudEventsMode,
    serializer: Serializer,
    value: Any,
    at: datetime,
    content_type: str,
    type_: str,
    schema: str,
    headers: list[tuple[str, str | bytes | None]],
) -> None:
    try:
        placed = event(
            value, occurred_at=at, content_type=content_type, content_schema=schema, type=type_, headers=headers
        )
        written_value, written_headers = value_and_headers(
            RowEncoder(serializer, "/shop", MAX_RECORD_BYTES, mode).row(placed)
        )
    except InvalidEvent:
        return
    read = Received("t", 0, 0, 0, b"k", written_value, written_headers, "id").cloud_event()
    assert (read.get_id(), read.get_source(), read.get_type()) == (str(UUID(int=7)), "/shop", type_)
    assert (read.get_time(), read.get_dataschema() or "") == (at, schema)
    assert read.get_datacontenttype() == (content_type or "application/json")
    assert [item for item in headers if item[0] not in {name for name, _ in written_headers}] == []
    text = None if isinstance(value, bytes) else placed.value_text()  # As JSON, it may have a NUL, which is escaped.
    content = value if isinstance(value, bytes) else None if text is None else text.encode()
    if mode == "binary":
        assert written_value == content
    else:
        data = read.get_data()
        body = data.encode() if isinstance(data, str) else data
        assert body == content or data == json.loads(content or b"null")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "[1, 2e999]"])
def test_a_number_that_is_no_number_for_readers_stays_a_text(number: str) -> None:
    message = written(event(number.encode()), "structured", as_bytes)
    assert json.loads(message.value, parse_constant=pytest.fail)["data"] == number


STRUCTURED = {"content-type": b"application/cloudevents+json; charset=utf-8"}


@pytest.mark.parametrize(
    ("headers", "value"),
    [
        ({}, b"{}"),
        ({"content-type": b"application/json"}, b"{}"),
        ({"content-type": b"application/cloudevents-batch+json"}, b"[]"),
        (STRUCTURED, b""),
        (STRUCTURED, b"[]"),
        (STRUCTURED, b"\xff"),
        (STRUCTURED, b'{"specversion":"9","id":"1","source":"/s","type":"t"}'),
        (STRUCTURED, b"[" * 100_000),
        (STRUCTURED, b'{"specversion":"1.0","id":"1","source":"/s","type":"t","time":"9999-12-31T24:00:00Z"}'),
        ({"ce_id": b"\xff"}, b""),
        ({"ce_id": b"1", "ce_source": b"/s", "ce_type": b"t", "ce_specversion": b"1.0", "ce_time": b"noon"}, b""),
    ],
)
def test_an_inbox_says_that_a_record_is_no_cloud_event(headers: dict[str, bytes], value: bytes) -> None:
    with pytest.raises(ValueError, match="the record is no CloudEvent: "):
        received(KafkaMessage(headers, None, value)).cloud_event()


NAMES = st.sampled_from(["ce_id", "ce_source", "ce_type", "ce_specversion", "ce_time", "CE_x", "content-type", "a"])
BODIES = st.none() | st.binary(max_size=8) | st.sampled_from([b"1.0", b"0.3", *STRUCTURED.values()])
VALUES = st.none() | st.binary(max_size=20) | st.builds(lambda value: json.dumps(value).encode(), JSON_VALUES)


@given(st.binary(max_size=4) | st.none(), VALUES, st.lists(st.tuples(NAMES, BODIES), max_size=8))
def test_whatever_comes_is_a_cloud_event_or_a_value_error(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    try:
        Received("t", 0, 0, 0, key, value, tuple(headers), "id").cloud_event()
    except ValueError as error:
        assert str(error).startswith("the record is no CloudEvent: ")  # noqa: PT017
