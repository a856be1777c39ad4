"""Events refuse what the table or the broker would refuse."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from outbox_plugin.errors import InvalidEvent
from outbox_plugin.event import Event


def test_an_event_carries_its_type_and_its_idempotency_key_in_headers() -> None:
    key = UUID(int=7)
    event = Event(topic="orders", key="o-1", type="OrderPlaced", idempotency_key=key, headers={"tenant": "a"})
    assert event.header_items() == [("event-type", "OrderPlaced"), ("idempotency-key", str(key)), ("tenant", "a")]


def test_every_event_has_an_idempotency_key_of_its_own() -> None:
    keys = {Event(topic="t", key="k").idempotency_key for _ in range(100)}
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
        ("topic", {"topic": "t" * 250}),
        ("key", {"key": "k" * 101}),
        ("key", {"key": None}),
        ("headers.a", {"headers": {"a": 1}}),
        ("colour", {"colour": "red"}),
    ],
)
def test_a_wrong_field_is_named(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvent) as caught:
        Event(**{"topic": "t", "key": "k", **wrong})
    assert caught.value.field == field


def test_a_value_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidEvent) as caught:
        Event(topic="t", key="k", value={"at": object()}).value_text()
    assert caught.value.field == "value"
