"""What a handler gets: a record as it came, and what identifies it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from outbox_plugin.event import EVENT_TYPE_HEADER, IDEMPOTENCY_HEADER, OCCURRED_AT_HEADER

Place = tuple[str, int]  # Topic and partition.
Headers = tuple[tuple[str, bytes | None], ...]

IDENTITY_BYTES = 1_000  # With the group's name, less than a third of a page: Postgres' index takes no more.
_EARLIEST, _LATEST = -62_135_596_800_000, 253_402_300_799_999  # Years 1 and 9999, in milliseconds since 1970.


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
    def source(self) -> str:
        """What its idempotency key is unique in: the topic, and the type where it has one."""
        kind = next((value for name, value in self.headers if name == EVENT_TYPE_HEADER), None)
        return f"{self.topic} {_kept(kind)}" if kind else self.topic

    @property
    def size(self) -> int:
        """How many bytes its key, value and headers have."""
        body = len(self.key or b"") + len(self.value or b"")
        return body + sum(len(name) + len(value or b"") for name, value in self.headers)

    @property
    def type(self) -> str:
        """What happened, as the header `event-type` says; empty when it does not."""
        return self.header(EVENT_TYPE_HEADER) or ""

    @property
    def occurred_at(self) -> datetime:
        """When it happened, as the header `occurred-at` says; where that says nothing, the record's time in Kafka.

        A time in Kafka that is before the year 1 or after 9999 is given as the first or the last that there is.
        """
        try:
            said = datetime.fromisoformat(self.header(OCCURRED_AT_HEADER) or "")
        except ValueError:
            said = None
        if said is not None and said.tzinfo:
            return said
        milliseconds = min(max(self.timestamp, _EARLIEST), _LATEST)  # A producer may write any number.
        return datetime.fromtimestamp(milliseconds / 1000, UTC)

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
            ValueError: it is none, or nested too deeply to be read.
        """
        try:
            return None if self.value is None else json.loads(self.value)
        except RecursionError:
            raise ValueError("the value is JSON that is nested too deeply") from None


def identity(headers: Headers, topic: str, partition: int, offset: int) -> str:
    """The event's idempotency key: the header's, or, where the producer sends none, the record's place in Kafka.

    Events that name themselves differently get different keys. A name that Postgres cannot hold as text, or that its
    index is too narrow for, is stood for by its SHA-256.
    """
    for name, value in headers:
        if name == IDEMPOTENCY_HEADER and value:
            return _kept(value)
    return f"{topic}/{partition}/{offset}"


def _kept(value: bytes) -> str:
    """`value` as text; or its digest, where Postgres cannot hold that as text, or its index is too narrow for it."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return _digest(value)
    return _digest(value) if "\0" in text or len(value) > IDENTITY_BYTES else text


def _digest(value: bytes) -> str:
    return f"sha256:{sha256(value).hexdigest()}"
