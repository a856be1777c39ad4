"""What a handler gets: a record as it came, and what identifies it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from outbox_plugin.event import EVENT_TYPE_HEADER, IDEMPOTENCY_HEADER, OCCURRED_AT_HEADER

Place = tuple[str, int]  # Topic and partition.
Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(slots=True)
class Received:
    """An event as it was received.

    Attributes:
        topic, partition, offset: where the record stands in Kafka.
        timestamp: when it was written, in milliseconds since 1970.
        key: its key, as bytes; None when it has none.
        value: its content, as bytes; None for a tombstone.
        headers: all of them, in their order; a name may occur twice.
        idempotency_key: tells this event from every other; what the inbox remembers.
        dead_letter: the number of the dead letter that is being tried again; None on the usual way.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    idempotency_key: str
    dead_letter: int | None = None

    @property
    def type(self) -> str:
        """What happened, as the header `event-type` says; empty when it does not."""
        return self.header(EVENT_TYPE_HEADER) or ""

    @property
    def occurred_at(self) -> datetime:
        """When it happened, as the header `occurred-at` says; where that says nothing, the record's time in Kafka."""
        try:
            said = datetime.fromisoformat(self.header(OCCURRED_AT_HEADER) or "")
        except ValueError:
            said = None
        return said if said is not None and said.tzinfo else datetime.fromtimestamp(self.timestamp / 1000, UTC)

    @property
    def key_text(self) -> str | None:
        """The key as text.

        Raises:
            UnicodeDecodeError: it is none.
        """
        return None if self.key is None else self.key.decode()

    def header(self, name: str) -> str | None:
        """The last header of that name as text; None when there is none."""
        found = [value for key, value in self.headers if key == name]
        return found[-1].decode("utf-8", "replace") if found and found[-1] is not None else None

    def json(self) -> Any:
        """The value, read as JSON; None for a tombstone.

        Raises:
            ValueError: it is none.
        """
        return None if self.value is None else json.loads(self.value)


def identity(headers: Headers, topic: str, partition: int, offset: int) -> str:
    """The event's idempotency key: the header's, or, where the producer sends none, the record's place in Kafka."""
    for name, value in headers:
        if name == IDEMPOTENCY_HEADER and value:
            return value.decode("utf-8", "replace").replace("\0", "")
    return f"{topic}/{partition}/{offset}"
