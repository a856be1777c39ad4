"""What an application emits."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outbox_plugin.errors import InvalidEvent

IDEMPOTENCY_HEADER = "idempotency-key"
EVENT_TYPE_HEADER = "event-type"
MAX_KEY_CHARACTERS = 100  # The contract's VARCHAR(100).
TOPIC_PATTERN = r"^[A-Za-z0-9._-]{1,249}$"  # Kafka's own rule for topic names.


class Event(BaseModel):
    """An event: what happened, to whom, for whom.

    Example: `Event(topic="orders", key="order-17", type="OrderPlaced", value={"total": 12})`.

    Attributes:
        topic: the Kafka topic it goes to.
        key: the partition key; events of one key stay in order. At most 100 characters.
        value: its content: text as it is, None for a tombstone, anything else as JSON.
        type: what happened, carried in the header `event-type`; none when empty.
        idempotency_key: tells this event from every other one; carried in the header `idempotency-key`.
        headers: further headers, text to text.

    Raises:
        InvalidEvent: a field is wrong; the exception names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    topic: str = Field(pattern=TOPIC_PATTERN)
    key: str = Field(max_length=MAX_KEY_CHARACTERS)
    value: Any = None
    type: str = ""
    idempotency_key: UUID = Field(default_factory=uuid4)
    headers: dict[str, str] = Field(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise InvalidEvent(field, first["msg"]) from None

    def value_text(self) -> str | None:
        """The value as it stands in the outbox; None is a tombstone."""
        if self.value is None or isinstance(self.value, str):
            return self.value
        try:
            return json.dumps(self.value, separators=(",", ":"), ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise InvalidEvent("value", str(error)) from None

    def header_items(self) -> list[tuple[str, str]]:
        """All headers, ours first, in a fixed order."""
        ours = {EVENT_TYPE_HEADER: self.type} if self.type else {}
        ours[IDEMPOTENCY_HEADER] = str(self.idempotency_key)
        return list((ours | self.headers).items())
