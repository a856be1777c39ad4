"""Turns an event into its row, or refuses it with the name of the field that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from outbox_plugin.core.whole_record import WHOLE_RECORD_HEADER, ordering_key, text_of
from outbox_plugin.emit.cloud_events import CloudEventsMode, Items, cloud_events_format, plain
from outbox_plugin.emit.event import EARLIEST, KAFKAS_OWN, LATEST, MAX_KEY_CHARACTERS, PARTITIONS, TOPIC_PATTERN, Event
from outbox_plugin.errors import InvalidEvent

try:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    _trace: TraceContextTextMapPropagator | None = TraceContextTextMapPropagator()
except ImportError:
    _trace = None

PlainRow = tuple[str, str, str | bytes | None, list[str], list[str | None]]
# Beside that: key, value and header values as bytes, partition, timestamp.
WholeRow = tuple[
    str,
    str,
    str | bytes | None,
    list[str],
    list[str | None],
    bytes | None,
    bytes | None,
    list[bytes | None],
    int | None,
    datetime | None,
]
Row = PlainRow | WholeRow
Serializer = Callable[[Event], str | bytes | None]

MAX_RECORD_BYTES = 1_000_000  # librdkafka's message.max.bytes; a broker's default is slightly larger.
_RECORD_OVERHEAD = 100
_HEADER_OVERHEAD = 10
_TOPIC = re.compile(TOPIC_PATTERN)


def as_text(event: Event) -> str | bytes | None:
    """The value as JSON, for a table whose values are TEXT. Text and bytes stay unchanged."""
    if isinstance(event.value, bytes):
        text = text_of(event.value)
        return event.value if text is None else text
    return event.value_text()


def as_bytes(event: Event) -> bytes | None:
    """The value as JSON, for a table whose values are BYTEA. Bytes stay unchanged; text is encoded in UTF-8."""
    if isinstance(event.value, bytes):
        return event.value
    text = event.value_text()
    return None if text is None else _utf8("value", text)


class RowEncoder:
    """Makes the rows of an outbox from events.

    Args:
        serializer: makes a record's value of an event.
        cloud_events: the source of CloudEvents, if events are to be such; None otherwise.
        max_record_bytes: how large a record may be.
        mode: where the attributes of CloudEvents are.
    """

    def __init__(
        self,
        serializer: Serializer,
        cloud_events: str | None,
        max_record_bytes: int,
        mode: CloudEventsMode = "binary",
    ) -> None:
        self._serializer = serializer
        content_type = "application/json" if serializer in (as_text, as_bytes) else ""  # Empty: events name their own.
        self._format = plain if cloud_events is None else cloud_events_format(cloud_events, mode, content_type)
        self._max_record_bytes = max_record_bytes
        self._good_topics: set[str] = set()

    def row(self, event: Event) -> Row:
        """The columns of the event's row.

        Raises:
            InvalidEvent: the table, or Kafka, would refuse it.
        """
        if event.topic not in self._good_topics:
            self._good_topics.add(_good_topic(event.topic))
        # A subclass that declares a field anew drops the field's constraints, so they are checked here again.
        key = event.key
        if not isinstance(key, bytes) and (not isinstance(key, str) or len(key) > MAX_KEY_CHARACTERS):
            raise InvalidEvent(
                "key", f"expected text of up to {MAX_KEY_CHARACTERS} characters, or bytes (given: {key!r})"
            )
        value, items = self._format(event, self._serializer(event))
        if _trace is not None:
            items = _with_trace(items)
        if self._serializer is as_text:
            value = _text_if_possible(value)
        is_whole_value = isinstance(value, bytes) and self._serializer is as_text
        if (
            is_whole_value
            or isinstance(key, bytes)
            or not isinstance(event.headers, dict)
            or event.partition is not None
            or event.timestamp is not None
        ):
            return self._row_of_any(event, value, items, is_whole_value=is_whole_value)
        names = [name for name, _ in items]
        texts: list[Any] = [text for _, text in items]
        self._check(key, value, names, texts)
        return event.topic, key, value, names, texts

    def _row_of_any(self, event: Event, value: str | bytes | None, items: Items, *, is_whole_value: bool) -> Row:
        """The row of an event that may be a whole record: it is one only where goharvest's columns cannot hold it."""
        key = event.key.encode() if isinstance(event.key, str) else event.key
        ordering = ordering_key(key, MAX_KEY_CHARACTERS)
        bodies = [_text_if_possible(body) for _, body in items]
        names = [name for name, _ in items]
        for name, body in zip(names, bodies, strict=True):
            _utf8(f"headers.{name}", name)
            if isinstance(body, str):
                _utf8(f"headers.{name}", body)
        if isinstance(event.key, str):
            _utf8("key", event.key)
        if isinstance(value, str):
            _utf8("value", value)
        encoded = [body.encode() if isinstance(body, str) else body for body in bodies]
        sizes = (len(part) for part in (key, *map(str.encode, names), *encoded) if part is not None)
        size = _RECORD_OVERHEAD + _HEADER_OVERHEAD * len(names) + sum(sizes)
        self._check_size(size + len(value.encode() if isinstance(value, str) else value or b""))
        has_key = ordering.encode() == key
        if (
            has_key
            and not is_whole_value
            and not any(isinstance(body, bytes) for body in bodies)
            and event.partition is None
            and event.timestamp is None
        ):
            return event.topic, ordering, value, names, [body for body in bodies if not isinstance(body, bytes)]
        return (
            event.topic,
            ordering,
            None if is_whole_value else value,
            [WHOLE_RECORD_HEADER, *names],
            [],
            None if has_key else key,
            value if is_whole_value and isinstance(value, bytes) else None,
            encoded,
            _good_partition(event.partition),
            _in_utc(event.timestamp),
        )

    def _check(self, key: str, value: str | bytes | None, names: list[str], texts: list[str]) -> None:
        """Raises InvalidEvent for text that Postgres cannot store, and for a record that is too large."""
        size = _RECORD_OVERHEAD + _HEADER_OVERHEAD * len(names)
        try:
            together = "".join((key, *names, *texts, value if isinstance(value, str) else ""))
            size += len(together) if together.isascii() else len(together.encode())
            fine = "\0" not in together
        except (TypeError, UnicodeEncodeError):
            fine = False
        if not fine:
            _blame(key, value, names, texts)
        if isinstance(value, bytes):
            size += len(value)
        self._check_size(size)

    def _check_size(self, size: int) -> None:
        if size > self._max_record_bytes:
            raise InvalidEvent(
                "value",
                f"the record has {size:,} bytes; Kafka takes {self._max_record_bytes:,}; larger values can go to an "
                "object store by a ClaimCheck (above_bytes)",
            )


def _text_if_possible(body: str | bytes | None) -> str | bytes | None:
    text = text_of(body) if isinstance(body, bytes) else None
    return body if text is None else text


def _good_topic(topic: str) -> str:
    if isinstance(topic, str) and topic.startswith(KAFKAS_OWN):
        raise InvalidEvent("topic", f"names that begin with {KAFKAS_OWN} are for Kafka's own topics (given: {topic!r})")
    if not isinstance(topic, str) or not _TOPIC.fullmatch(topic) or topic in (".", ".."):
        raise InvalidEvent("topic", f"expected 1 to 249 letters, digits, dots, _ and - (given: {topic!r})")
    return topic


def _good_partition(partition: int | None) -> int | None:
    if partition is not None and (not isinstance(partition, int) or not 0 <= partition < PARTITIONS):
        raise InvalidEvent("partition", f"expected a number from 0 to {PARTITIONS - 1} (given: {partition!r})")
    return partition


def _in_utc(timestamp: datetime | None) -> datetime | None:
    """The same time in UTC. Postgres does not know every offset that Python knows."""
    if timestamp is None:
        return None
    if not isinstance(timestamp, datetime) or timestamp.utcoffset() is None or not EARLIEST <= timestamp <= LATEST:
        raise InvalidEvent("timestamp", f"expected a time after 1970 began, with its zone (given: {timestamp!r})")
    return timestamp.astimezone(UTC)


def _with_trace(items: Items) -> Items:
    """Add the current span's `traceparent`, unless the event has one."""
    carrier: dict[str, str] = {}
    if _trace is not None:
        _trace.inject(carrier)
    if not carrier or any(name == "traceparent" for name, _ in items):
        return items
    return [*items, *carrier.items()]


def _blame(key: str, value: str | bytes | None, names: list[str], texts: list[str]) -> None:
    """Raises InvalidEvent for the first text that Postgres cannot store."""
    _utf8("key", key)
    for name, text in zip(names, texts, strict=True):
        _utf8(f"headers.{name}", name)
        _utf8(f"headers.{name}", text)
    if isinstance(value, str):
        _utf8("value", value)


def _utf8(field: str, text: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidEvent(field, f"expected text (given: {text!r})")
    if "\0" in text:
        raise InvalidEvent(field, "Postgres keeps no NUL character in a text")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidEvent(field, f"not valid text: {error.reason}") from None
