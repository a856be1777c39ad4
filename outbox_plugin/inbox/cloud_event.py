"""Reads a CloudEvent from a record, in either mode of the Kafka protocol binding, by the library `cloudevents`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_plugin.errors import UserError

if TYPE_CHECKING:
    from cloudevents.core.base import BaseCloudEvent

_BINARY = "ce_"  # What the names of the headers with attributes begin with.
_CONTENT_TYPE = "content-type"
_STRUCTURED, _BATCHED = "application/cloudevents", "application/cloudevents-batch"


def read_cloud_event(
    key: bytes | None, value: bytes | None, headers: tuple[tuple[str, bytes | None], ...]
) -> BaseCloudEvent:
    """The CloudEvent that a record is. A key that is text becomes its attribute `partitionkey`.

    Args:
        key: the record's.
        value: the record's.
        headers: the record's, in their order.

    Raises:
        ValueError: the record is no CloudEvent.
        UserError: the library `cloudevents` is not installed.
    """
    try:
        from cloudevents.core.bindings.kafka import KafkaMessage, from_binary_event, from_structured_event
        from cloudevents.core.exceptions import CloudEventValidationError
    except ImportError:
        raise UserError("CloudEvents need the library cloudevents: install outbox-plugin[cloudevents]") from None
    found = {name.lower(): body for name, body in headers if body is not None}
    content_type = found.get(_CONTENT_TYPE, b"").decode(errors="replace").strip().lower()
    own = {name: body for name, body in found.items() if name.startswith(_BINARY) or name == _CONTENT_TYPE}
    message = KafkaMessage(own, _text(key), value or b"")
    try:
        if content_type.startswith(_STRUCTURED) and not content_type.startswith(_BATCHED):
            return from_structured_event(message)
        if any(name.startswith(_BINARY) for name in own):
            return from_binary_event(message)
    except (
        CloudEventValidationError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RecursionError,
        OverflowError,
    ) as error:
        raise ValueError(f"the record is no CloudEvent: {error}") from None
    raise ValueError(
        "the record is no CloudEvent: it has no header that begins with ce_, and its content-type is not that of a "
        "CloudEvent in structured mode"
    )


def _text(key: bytes | None) -> str | None:
    try:
        return None if key is None else key.decode()
    except UnicodeDecodeError:
        return None
