"""Makes CloudEvents 1.0 of events, in either mode of the Kafka protocol binding, by the library `cloudevents`.

In binary mode, the attributes are headers, and the value stays as it is. In structured mode, the value is a JSON object
with the attributes and the data.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from math import isinf
from typing import Any, Literal, Protocol, cast

from outbox_plugin.core.headers import CLAIM_CHECK_HEADER, CONTENT_TYPE_HEADER, EVENT_TYPE_HEADER, OCCURRED_AT_HEADER
from outbox_plugin.core.whole_record import text_of
from outbox_plugin.emit.event import Event
from outbox_plugin.errors import InvalidEvent, UserError

Value = str | bytes | None
Items = list[tuple[str, str | bytes | None]]  # Headers.
CloudEventsMode = Literal["binary", "structured"]

_PREFIX = "ce_"  # What the names of headers with attributes begin with.
_STRUCTURED = "application/cloudevents"  # What media types of structured events begin with.
_FIELDS = {"type": "type", "datacontenttype": "content_type", "dataschema": "content_schema", "time": "occurred_at"}

# Media types whose content is JSON, and those whose content is a text.
_JSON = re.compile(r"[^;]*[/+]json *(;|$)", re.IGNORECASE)
_TEXT = re.compile(r"text/|[^;]*[/+]xml *(;|$)", re.IGNORECASE)


class Format(Protocol):
    """Makes the value and the headers of an event's record."""

    def __call__(self, event: Event, value: Value) -> tuple[Value, Items]:
        """The value and the headers.

        Args:
            event: has the attributes.
            value: the event's value, serialized.

        Raises:
            InvalidEvent: the event lacks an attribute, or has a wrong one.
        """
        ...


def plain(event: Event, value: Value) -> tuple[Value, Items]:
    """The format of events that are no CloudEvents: the value as it is, and the headers of `Event`."""
    return value, event.header_items()


def cloud_events_format(source: str, mode: CloudEventsMode, content_type: str) -> Format:
    """The format of CloudEvents.

    Args:
        source: where the events come from, as a URI reference.
        mode: where the attributes are: in headers (`binary`), or in the value (`structured`).
        content_type: of events that do not name theirs. If it is empty, these have none.

    Raises:
        UserError: the library `cloudevents` is not installed, the source is none, or there is no such mode.
    """
    try:
        from cloudevents.core.bindings.kafka import to_binary_event, to_structured_event
        from cloudevents.core.exceptions import CloudEventValidationError
        from cloudevents.core.v1.event import CloudEvent
    except ImportError:
        raise UserError("CloudEvents need the library cloudevents: install outbox-plugin[cloudevents]") from None
    if mode not in ("binary", "structured"):
        raise UserError(f"cloud_events_mode: expected 'binary' or 'structured' (given: {mode!r})")

    if not isinstance(source, str) or not source.isprintable() or source.split() != [source]:
        raise UserError(f"cloud_events: expected a URI reference, such as '/shop/orders' (given: {source!r})")

    def cloud_event(attributes: dict[str, Any], fields: dict[str, str]) -> CloudEvent:
        try:
            return CloudEvent(attributes)
        except CloudEventValidationError as error:
            name, problems = next(iter(error.errors.items()))
            raise InvalidEvent(fields.get(name, name), str(problems[0])) from None

    def binary(event: Event, value: Value) -> tuple[Value, Items]:
        attributes = _attributes(event, source, content_type)
        if str(attributes.get("datacontenttype", "")).strip().lower().startswith(_STRUCTURED):
            raise InvalidEvent(
                "content_type",
                f"in binary mode, readers take a value of {_STRUCTURED}… for an event in structured mode; give the "
                "outbox cloud_events_mode='structured', or the event another content_type",
            )
        items = _with_others(to_binary_event(cloud_event(attributes, _FIELDS)).headers, event)
        extensions, fields = _extensions(event)
        if extensions:
            cloud_event({**extensions, **attributes}, fields)
        return value, items

    def structured(event: Event, value: Value) -> tuple[Value, Items]:
        # A tombstone has no value that could hold the attributes. That of a claim is fetched from elsewhere, and then
        # stands in the place of the record's own, so that it has to be the data alone.
        if value is None or any(name == CLAIM_CHECK_HEADER for name, _ in event.header_items()):
            return binary(event, value)
        message = to_structured_event(cloud_event(_attributes(event, source, content_type), _FIELDS))
        # The library would read the data and write it again, and so change decimals and drop keys that occur twice.
        attributes = message.value.decode().removesuffix("}")
        data = event.value if isinstance(event.value, bytes) and text_of(event.value) == value else value
        body = f"{attributes}, {_data_member(data, event.content_type or content_type)}}}"
        return body.encode() if isinstance(value, bytes) else body, _with_others(message.headers, event)

    return binary if mode == "binary" else structured


def _attributes(event: Event, source: str, content_type: str) -> dict[str, Any]:
    if not event.type:
        raise InvalidEvent("type", "a CloudEvent must have one")
    attributes: dict[str, Any] = {
        "id": str(event.idempotency_key),
        "source": source,
        "type": event.type,
        "time": _time(event.occurred_at),
    }
    if event.content_type or content_type:
        attributes["datacontenttype"] = event.content_type or content_type
    if event.content_schema:
        attributes["dataschema"] = event.content_schema
    for name in ("type", "datacontenttype", "dataschema"):  # A subclass may give them defaults that nothing checked.
        try:
            str(attributes.get(name, "")).encode()
        except UnicodeEncodeError as error:
            raise InvalidEvent(_FIELDS[name], f"not valid text: {error.reason}") from None
    return attributes


def _time(occurred_at: datetime) -> datetime:
    """The same time with an offset in whole minutes: RFC 3339 knows no seconds, which local mean times have."""
    if not (occurred_at.utcoffset() or timedelta()) % timedelta(minutes=1):
        return occurred_at
    try:
        return occurred_at.astimezone(UTC)
    except OverflowError:
        raise InvalidEvent("occurred_at", f"{occurred_at.isoformat()} is no time in UTC") from None


def _extensions(event: Event) -> tuple[dict[str, str], dict[str, str]]:
    """The attributes that readers find in the event's own headers, and the fields to blame for each."""
    extensions: dict[str, str] = {}
    fields: dict[str, str] = {}
    for header, body in event.headers.items() if isinstance(event.headers, dict) else event.headers:
        name = header.lower()
        if not name.startswith(_PREFIX) or body is None:
            continue
        name = name.removeprefix(_PREFIX)
        fields[name] = f"headers.{header}"
        if name == "datacontenttype":
            raise InvalidEvent(fields[name], "a CloudEvent has it in the header content-type: set content_type instead")
        try:
            extensions[name] = body.decode() if isinstance(body, bytes) else body
        except UnicodeDecodeError:
            raise InvalidEvent(fields[name], "a CloudEvent's attribute must be a text in UTF-8") from None
    return extensions, fields


def _with_others(headers: dict[str, bytes], event: Event) -> Items:
    """The headers of a CloudEvent, and those of the event that say something else."""
    items: Items = [(name, body.decode()) for name, body in headers.items()]
    said = {EVENT_TYPE_HEADER, OCCURRED_AT_HEADER, *headers}
    others = [(name, text) for name, text in event.header_items() if name not in said]
    for name, _ in others:
        # Readers ignore the case, so that the event would have another id, for example.
        if name.lower() in (*headers, CONTENT_TYPE_HEADER):
            raise InvalidEvent("headers", f"the header {name!r} is one of the CloudEvent's own in other letters")
    return items + others


def _data_member(value: str | bytes, content_type: str) -> str:
    """The member of a structured event that has its data: JSON as it was given, a text, or bytes in base64.

    Raises:
        InvalidEvent: the data is JSON that is nested too deeply.
    """
    text = text_of(value) if isinstance(value, bytes) else value
    is_json = bool(_JSON.match(content_type))
    if text is None or (isinstance(value, bytes) and not is_json and not _TEXT.match(content_type)):
        return f'"data_base64": "{b64encode(cast("bytes", value)).decode()}"'
    return f'"data": {text if is_json and _is_json(text) else json.dumps(text, ensure_ascii=False)}'


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise InvalidEvent("value", "it is nested too deeply") from None
    except ValueError:
        return False
    return True


def _finite(number: str) -> float:
    """The number, unless it is too large: written again, it would be Infinity."""
    found = float(number)
    return _refuse(number) if isinf(found) else found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
