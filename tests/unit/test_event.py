"""Events refuse what the table or the broker would refuse."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel, create_model

from outbox_plugin.emit.event import Event
from outbox_plugin.emit.row_encoder import MAX_RECORD_BYTES, RowEncoder, as_bytes, as_text
from outbox_plugin.errors import InvalidEvent

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CARRIED = [("idempotency-key", str(UUID(int=7))), ("occurred-at", "2026-01-01T12:00:00+00:00")]


class Order(BaseModel):
    total: int
    placed_at: datetime = NOON


class OrderPlaced(Event):
    topic: str = "orders"
    type: str = "OrderPlaced"
    value: Order


def event(**wanted: Any) -> Event:
    return Event(
        **{
            "topic": "orders",
            "key": "o-1",
            "value": None,
            "idempotency_key": UUID(int=7),
            "occurred_at": NOON,
            **wanted,
        }
    )


def test_an_event_carries_what_it_is_in_headers() -> None:
    assert event(headers={"tenant": "a"}).header_items() == [*CARRIED, ("tenant", "a")]
    said = event(type="OrderPlaced", content_type="text/plain", content_schema="https://schemas/order")
    assert said.header_items() == [
        ("event-type", "OrderPlaced"),
        *CARRIED,
        ("content-type", "text/plain"),
        ("content-schema", "https://schemas/order"),
    ]


def test_a_subclass_says_what_is_always_so_and_types_the_value() -> None:
    placed = OrderPlaced(key="o-1", value=Order(total=12))
    assert (placed.topic, placed.type) == ("orders", "OrderPlaced")
    assert placed.value_text() == '{"total":12,"placed_at":"2026-01-01T12:00:00+00:00"}'
    with pytest.raises(InvalidEvent) as caught:
        OrderPlaced(key="o-1", value={"total": "a dozen"})  # type: ignore[arg-type]
    assert caught.value.field == "value.total"


def test_every_event_has_an_idempotency_key_of_its_own() -> None:
    keys = {Event(topic="t", key="k", value=1).idempotency_key for _ in range(100)}
    assert len(keys) == 100


@pytest.mark.parametrize(
    ("value", "text"), [(None, None), ("as it is", "as it is"), ({"a": 1, "b": "ü"}, '{"a":1,"b":"ü"}'), ([1], "[1]")]
)
def test_values(value: Any, text: str | None) -> None:
    assert Event(topic="t", key="k", value=value).value_text() == text


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("topic", {"topic": ""}),
        ("topic", {"topic": "no spaces"}),
        ("topic", {"topic": "orders\n"}),
        ("topic", {"topic": "t" * 250}),
        ("key", {"key": "k" * 101}),
        ("key", {"key": None}),
        ("headers.a", {"headers": {"a": 1}}),
        ("headers.a", {"headers": {"a": b"bytes"}}),
        ("headers.a", {"headers": {"a": "nul\0"}}),
        ("headers", {"headers": {"idempotency-key": "1"}}),
        ("key", {"key": "nul\0"}),
        ("key", {"key": 7}),
        ("headers", {"headers": [("idempotency-key", b"1")]}),
        ("headers", {"headers": [("", b"1")]}),
        ("headers.0.1", {"headers": [("a", 1)]}),
        ("partition", {"partition": -1}),
        ("partition", {"partition": "1"}),
        ("timestamp", {"timestamp": datetime(2026, 1, 1)}),
        ("timestamp", {"timestamp": datetime(1970, 1, 1, tzinfo=UTC)}),
        ("timestamp", {"timestamp": datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-1)))}),
        ("occurred_at", {"occurred_at": datetime(2026, 1, 1)}),
        ("idempotency_key", {"idempotency_key": "mine"}),
        ("colour", {"colour": "red"}),
    ],
)
def test_a_wrong_field_is_named(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvent) as caught:
        Event(**{"topic": "t", "key": "k", "value": 1, **wrong})
    assert caught.value.field == field


@pytest.mark.parametrize("missing", ["topic", "key", "value"])
def test_what_is_missing_is_named(missing: str) -> None:
    given = {"topic": "t", "key": "k", "value": None}
    del given[missing]
    with pytest.raises(InvalidEvent, match=f"event {missing}: Field required") as caught:
        Event(**given)  # type: ignore[arg-type]
    assert caught.value.field == missing


@dataclass
class Flight:
    at: datetime
    seats: tuple[int, ...] = (1, 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"at": NOON, "day": date(2026, 1, 1)}, '{"at":"2026-01-01T12:00:00+00:00","day":"2026-01-01"}'),
        (Flight(NOON), '{"at":"2026-01-01T12:00:00+00:00","seats":[1,2]}'),
        ([UUID(int=7), Decimal("1.50")], '["00000000-0000-0000-0000-000000000007","1.50"]'),
        (Order(total=1), '{"total":1,"placed_at":"2026-01-01T12:00:00+00:00"}'),
    ],
)
def test_values_of_many_kinds(value: Any, text: str) -> None:
    assert event(value=value).value_text() == text


def nested(depth: int) -> Any:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        {"at": object()},
        {"at": datetime(2026, 1, 1)},
        Flight(datetime(2026, 1, 1)),
        Order(total=1, placed_at=datetime(2026, 1, 1)),
        float("nan"),
        b"bytes",
        nested(100_000),
    ],
    ids=["object", "naive", "naive in a dataclass", "naive in a model", "nan", "bytes", "deep"],
)
def test_a_value_that_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(InvalidEvent) as caught:
        event(value=value).value_text()
    assert caught.value.field == "value"


class Loose(Event):
    """A subclass that declares fields anew, without their limits."""

    topic: str
    key: str = "k"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("topic", Loose(topic="no spaces", value=1)),
        ("topic", event(topic="..")),
        ("key", Loose(topic="t", key="k" * 101, value=1)),
        ("key", Loose(topic="t", key="nul\0", value=1)),
        ("value", event(value="x" * 1_000_000)),
        ("value", event(headers={"large": "x" * 1_000_000})),
        ("value", event(value="nul\0")),
        ("value", event(value={"lone surrogate": "\ud800"})),
    ],
)
def test_what_the_table_or_kafka_would_refuse_is_refused_when_emitted(field: str, wrong: Event) -> None:
    with pytest.raises(InvalidEvent) as caught:
        RowEncoder(as_text, None, MAX_RECORD_BYTES).row(wrong)
    assert caught.value.field == field


NO_TEXT = b"\xff\x00"
AT = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)


@pytest.mark.parametrize(
    ("form", "same"),
    [
        ({"key": b"o-1"}, {}),
        ({"value": b"{}"}, {"value": "{}"}),
        ({"value": b""}, {"value": ""}),
        ({"headers": [("a", b"b")]}, {"headers": {"a": "b"}}),
        ({"headers": ()}, {}),
    ],
)
def test_bytes_that_are_a_text_are_written_as_that_text(form: dict[str, Any], same: dict[str, Any]) -> None:
    encoder = RowEncoder(as_text, None, MAX_RECORD_BYTES)
    assert encoder.row(event(**form)) == encoder.row(event(**same))


@pytest.mark.parametrize(
    ("whole", "columns"),
    [
        ({"key": NO_TEXT}, (NO_TEXT, None, None, None)),
        ({"key": b"k" * 101}, (b"k" * 101, None, None, None)),
        ({"value": NO_TEXT}, (None, NO_TEXT, None, None)),
        ({"headers": [("a", NO_TEXT)]}, (None, None, None, None)),
        ({"partition": 2}, (None, None, 2, None)),
        ({"timestamp": AT}, (None, None, None, AT)),
    ],
)
def test_what_goharvests_columns_cannot_hold_is_written_so_that_who_knows_only_these_refuses_it(
    whole: dict[str, Any], columns: tuple[Any, ...]
) -> None:
    row: Any = RowEncoder(as_text, None, MAX_RECORD_BYTES).row(event(**whole))
    assert (row[3][0], row[4], len(row[3])) == ("outbox-record", [], 1 + len(row[7]))
    assert (row[5], row[6], row[8], row[9]) == columns


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("partition", -1),
        ("partition", 2**31),
        ("partition", "1"),
        ("timestamp", datetime(2026, 1, 1)),
        ("timestamp", datetime(1960, 1, 1, tzinfo=UTC)),
        ("timestamp", datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-1)))),
        ("timestamp", "2026-01-01T00:00:00Z"),
    ],
)
def test_a_default_of_a_subclass_that_no_record_can_have_is_refused(field: str, default: Any) -> None:
    fields: Any = {field: (Any, default)}
    subclass = create_model("Mine", __base__=Event, **fields)
    with pytest.raises(InvalidEvent) as caught:
        RowEncoder(as_text, None, MAX_RECORD_BYTES).row(subclass(topic="t", key="k", value=1))
    assert caught.value.field == field


def test_headers_may_repeat_and_be_null_in_goharvests_columns() -> None:
    row = RowEncoder(as_text, None, MAX_RECORD_BYTES).row(event(headers=[("a", "1"), ("a", None), ("b", b"2")]))
    assert (row[3][2:], row[4][2:]) == (["a", "a", "b"], ["1", None, "2"])
    assert len(row) == 5


def test_a_key_has_one_order_in_whichever_form_it_is_emitted() -> None:
    encoder = RowEncoder(as_text, None, MAX_RECORD_BYTES)
    assert encoder.row(event(key=b"o-1", partition=1))[1] == encoder.row(event(key="o-1"))[1] == "o-1"
    others = [bytes([255, *more]) for more in ([], [0], [1], [1] * 47, [1] * 48, [1] * 49, [2] * 49)]
    orders = [encoder.row(event(key=key))[1] for key in others]
    assert len(set(orders)) == len(others)
    assert max(map(len, orders)) == 100


def test_a_whole_record_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidEvent, match=r"the record has 1,000,.*; larger values can go to .* by a ClaimCheck"):
        RowEncoder(as_text, None, MAX_RECORD_BYTES).row(event(value=b"\xff" * 999_900))


def test_cloud_events_in_binary_mode() -> None:
    """Read back by the library's own reader, as a consumer would."""
    encoder = RowEncoder(as_bytes, "/shop", MAX_RECORD_BYTES)
    placed = event(type="OrderPlaced", value={"total": 12}, content_schema="https://schemas/order", headers={"a": "b"})
    _, key, value, names, texts = encoder.row(placed)[:5]
    headers = dict(zip(names, map(str, texts), strict=True))
    read = from_binary_event(KafkaMessage({name: text.encode() for name, text in headers.items()}, key, value))  # type: ignore[arg-type]
    assert (read.get_id(), read.get_source(), read.get_type()) == (str(UUID(int=7)), "/shop", "OrderPlaced")
    assert (read.get_time(), read.get_dataschema(), read.get_data()) == (NOON, "https://schemas/order", {"total": 12})
    assert (headers["content-type"], headers["idempotency-key"], headers["a"]) == (
        "application/json",
        str(UUID(int=7)),
        "b",
    )
    with pytest.raises(InvalidEvent, match="event type: "):
        encoder.row(event())


def test_a_cloud_event_says_only_of_what_we_wrote_that_it_is_json() -> None:
    encoder = RowEncoder(lambda _: b"\x00\x01", "/shop", MAX_RECORD_BYTES)
    assert "content-type" not in encoder.row(event(type="OrderPlaced"))[3]
    _, _, _, names, texts = encoder.row(event(type="OrderPlaced", content_type="application/avro"))[:5]
    assert texts[names.index("content-type")] == "application/avro"


def test_the_current_span_travels_with_the_event() -> None:
    encoder = RowEncoder(as_text, None, MAX_RECORD_BYTES)
    assert "traceparent" not in encoder.row(event())[3]
    with TracerProvider().get_tracer("test").start_as_current_span("work") as span:
        row, own = encoder.row(event()), encoder.row(event(headers={"traceparent": "mine"}))
        trace = format(span.get_span_context().trace_id, "032x")
    assert str(dict(zip(row[3], row[4], strict=True))["traceparent"]).split("-")[1] == trace
    assert own[4][own[3].index("traceparent")] == "mine"
