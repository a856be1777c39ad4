"""`Event`, which applications emit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID, uuid4

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticSerializationError, to_jsonable_python

from outbox_plugin.core.headers import (
    CONTENT_SCHEMA_HEADER,
    CONTENT_TYPE_HEADER,
    EVENT_TYPE_HEADER,
    IDEMPOTENCY_HEADER,
    OCCURRED_AT_HEADER,
)
from outbox_plugin.errors import InvalidEvent

MAX_KEY_CHARACTERS = 100  # The column kafka_key is VARCHAR(100).
PARTITIONS = 2**31  # Kafka's numbers of partitions are below.
TOPIC_PATTERN = r"^[A-Za-z0-9._-]{1,249}$"  # Kafka's rule for topic names.
KAFKAS_OWN = "__"  # Names of internal topics begin so: consumer offsets, transactions.

_OF_FIELDS = {
    EVENT_TYPE_HEADER: "type",
    IDEMPOTENCY_HEADER: "idempotency_key",
    OCCURRED_AT_HEADER: "occurred_at",
    CONTENT_TYPE_HEADER: "content_type",
    CONTENT_SCHEMA_HEADER: "content_schema",
}
# Postgres cannot store NUL in text. Strict, because pydantic would otherwise accept bytes and decode them.
_Text = Annotated[str, Strict(), Field(pattern=r"^[^\x00]*$")]
_TEXT, _BYTES, _NOTHING, _NAMED, _PAIRS = "[text]", "[bytes]", "[none]", "[mapping]", "[pairs]"  # Left out of messages.
_TAGS = {_TEXT, _BYTES, _NOTHING, _NAMED, _PAIRS, "[key]"}


def _kind_of_body(body: Any) -> str:
    return _BYTES if isinstance(body, bytes) else _NOTHING if body is None else _TEXT


def _kind_of_headers(headers: Any) -> str:
    return _PAIRS if isinstance(headers, Sequence) else _NAMED


_Bytes = Annotated[bytes, Strict(), Tag(_BYTES)]
_Key = Annotated[
    Annotated[_Text, Field(max_length=MAX_KEY_CHARACTERS), Tag(_TEXT)] | _Bytes,
    Discriminator(lambda key: _BYTES if isinstance(key, bytes) else _TEXT),
]
_HeaderValue = Annotated[
    Annotated[_Text, Tag(_TEXT)] | _Bytes | Annotated[None, Tag(_NOTHING)], Discriminator(_kind_of_body)
]
_Headers = Annotated[
    Annotated[dict[_Text, _Text], Tag(_NAMED)] | Annotated[Sequence[tuple[_Text, _HeaderValue]], Tag(_PAIRS)],
    Discriminator(_kind_of_headers),
]
EARLIEST = datetime(1970, 1, 1, 0, 0, 0, 1_000, tzinfo=UTC)  # Kafka's clients read 0 as the present time.
LATEST = datetime.max.replace(tzinfo=UTC)


class Event(BaseModel):
    """An event.

    A subclass sets the fields that all events of its kind share, and gives the value a type:

        class OrderPlaced(Event):
            topic: str = "orders"
            type: str = "OrderPlaced"
            value: Order  # A pydantic model, a dataclass, a TypedDict, …

        OrderPlaced(key="order-17", value=Order(total=12))

    Attributes:
        topic: the Kafka topic it goes to.
        key: the partition key; events of one key stay in order. A text of at most 100 characters, or bytes.
        value: its content. Text and bytes stay unchanged, None is a tombstone, anything else becomes JSON.
        type: what happened, in the header `event-type`; no header if empty.
        idempotency_key: identifies this event among all events, in the header `idempotency-key`.
        occurred_at: when it happened, with its time zone, in the header `occurred-at`; now by default.
        content_type: the value's media type, in the header `content-type`; no header if empty.
        content_schema: the value's schema, in the header `content-schema`; no header if empty.
        headers: further headers. A mapping of texts; or pairs of a name and a text, bytes or None, where a name may
            occur several times.
        partition: the partition that it goes to; None: the one that its key decides, as for Java's clients. Events of
            a key keep their order only within a partition.
        timestamp: the record's time, with its time zone; Kafka keeps milliseconds. None: when it is published, so that
            a topic keeps it as long as its settings say, however long it waited. `occurred_at` travels in any case.

    Raises:
        InvalidEvent: a field is wrong; the exception names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    topic: Annotated[_Text, Field(pattern=TOPIC_PATTERN)]
    key: _Key
    value: Any  # Required, so that a forgotten value does not become a tombstone.
    type: _Text = ""
    idempotency_key: UUID = Field(default_factory=uuid4)
    occurred_at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    content_type: _Text = ""
    content_schema: _Text = ""
    headers: _Headers = Field(default_factory=dict)
    partition: Annotated[int, Strict(), Field(ge=0, lt=PARTITIONS)] | None = None
    timestamp: Annotated[AwareDatetime, Field(ge=EARLIEST, le=LATEST)] | None = None

    if not TYPE_CHECKING:  # Type checkers derive the signature from the fields.

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _invalid(error) from None

    @field_validator("topic")
    @classmethod
    def _topic_is_for_events(cls, topic: str) -> str:
        if topic.startswith(KAFKAS_OWN):
            raise ValueError(f"names that begin with {KAFKAS_OWN} are for Kafka's own topics (given: {topic!r})")
        return topic

    @field_validator("headers")
    @classmethod
    def _headers_are_not_fields(cls, headers: _Headers) -> _Headers:
        names = headers if isinstance(headers, dict) else {name for name, _ in headers}
        if "" in names:
            raise ValueError("a header needs a name")
        for name, field in _OF_FIELDS.items():
            if name in names:
                raise ValueError(f"the header {name!r} is written from the field {field}: set that instead")
        return headers

    def value_text(self) -> str | None:
        """The value as the outbox stores it; None is a tombstone.

        Raises:
            InvalidEvent: JSON cannot express it, it is nested too deeply, or it has a datetime without a time zone.
        """
        if self.value is None or isinstance(self.value, str):
            return self.value
        try:
            return _ENCODER.encode(self.value)
        except (TypeError, ValueError, PydanticSerializationError) as error:
            raise InvalidEvent("value", str(error)) from None
        except RecursionError:
            raise InvalidEvent("value", "it is nested too deeply") from None

    def header_items(self) -> list[tuple[str, str | bytes | None]]:
        """All headers in a fixed order: first those of the event's fields, then `headers`."""
        items: list[tuple[str, str | bytes | None]] = [(EVENT_TYPE_HEADER, self.type)] if self.type else []
        items.append((IDEMPOTENCY_HEADER, str(self.idempotency_key)))
        items.append((OCCURRED_AT_HEADER, self.occurred_at.isoformat()))
        if self.content_type:
            items.append((CONTENT_TYPE_HEADER, self.content_type))
        if self.content_schema:
            items.append((CONTENT_SCHEMA_HEADER, self.content_schema))
        items.extend(self.headers.items() if isinstance(self.headers, dict) else self.headers)
        return items


def _invalid(error: ValidationError) -> InvalidEvent:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"] if part not in _TAGS]
    return InvalidEvent(".".join(path), first["msg"].removeprefix("Value error, "))


def _jsonable(value: Any) -> Any:
    """A replacement, in types that the JSON encoder knows, for a value that it does not know."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"the datetime {value.isoformat()} has no time zone")
        return value.isoformat()
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes are no text, and JSON has no bytes; a value may be bytes as a whole")
    return to_jsonable_python(value)


_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_jsonable)
