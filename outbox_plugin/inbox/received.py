"""What a handler gets: an event as it was received, and the key that identifies it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from outbox_plugin.core.event_identity import event_source
from outbox_plugin.core.headers import EVENT_TYPE_HEADER, OCCURRED_AT_HEADER
from outbox_plugin.core.memory_limit import record_size
from outbox_plugin.inbox.cloud_event import read_cloud_event

if TYPE_CHECKING:
    from cloudevents.core.base import BaseCloudEvent

Headers = tuple[tuple[str, bytes | None], ...]

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
        formerly: the keys by which versions before this one remember it, where they are others.
        unreadable_headers: the name of a header is not UTF-8, so `headers` is empty.
        named_by_place: no header tells which event it is; its place in Kafka does.
        leader_epoch: the epoch in which the partition's leader wrote it; None if Kafka does not return it.
        size: about how many bytes of memory it takes: those of its key, value and headers, and of the objects.
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
    formerly: tuple[str, ...] = field(default=(), compare=False)
    unreadable_headers: bool = False
    named_by_place: bool = field(default=False, compare=False)
    leader_epoch: int | None = field(default=None, compare=False)
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Count the bytes once, because each queue that holds the record needs them."""
        self.size = record_size(self.key, self.value, self.headers)

    @property
    def source(self) -> str:
        """What its idempotency key is unique in: the topic, and the type where it has one."""
        return event_source(self.topic, self.headers)

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
            occurred = datetime.fromisoformat(self.header(OCCURRED_AT_HEADER) or "")
        except ValueError:
            occurred = None
        if occurred is not None and occurred.tzinfo:
            return occurred
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

    def cloud_event(self) -> BaseCloudEvent:
        """The record, read as a CloudEvent: its attributes are in the headers or in the value.

        Raises:
            ValueError: it is none.
            UserError: the library `cloudevents` is not installed: install outbox-plugin[cloudevents].
        """
        return read_cloud_event(self.key, self.value, self.headers)
