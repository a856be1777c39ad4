"""Reads the configuration of a Debezium connector: what the outbox event router makes of a row. No I/O.

The properties are Debezium's: see "Outbox Event Router" in its documentation. A configuration whose records this
package cannot reproduce byte for byte is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from outbox_plugin.errors import UserError
from outbox_plugin.printable import printable

_ROUTER = "io.debezium.transforms.outbox.EventRouter"
_CONNECTOR = "io.debezium.connector.postgresql.PostgresConnector"
_ANY_VALUE = "(?<routedByValue>.*)"
_ROUTED_VALUE = "${routedByValue}"
_KNOWN = frozenset(
    {
        "type",
        "debezium.op.invalid.behavior",
        "route.by.field",
        "route.tombstone.on.empty.payload",
        "route.topic.regex",
        "route.topic.replacement",
        "table.expand.json.payload",
        "table.field.event.id",
        "table.field.event.key",
        "table.field.event.payload",
        "table.field.event.schema.version",
        "table.field.event.timestamp",
        "table.field.event.type",
        "table.field.payload",
        "table.field.payload.id",
        "table.field.schema.version",
        "table.fields.additional.error.on.missing",
        "table.fields.additional.placement",
        "table.op.invalid.behavior",
    }
)
# Debezium's defaults for properties that change the records. Debezium ignores the case of these values.
_DEFAULTS = {
    "binary.handling.mode": "bytes",
    "decimal.handling.mode": "precise",
    "field.name.adjustment.mode": "none",
    "flush.lsn.source": "true",  # With false, the slot's position does not move, and the change-over waits for ever.
    "hstore.handling.mode": "json",
    "interval.handling.mode": "numeric",
    "lsn.flush.mode": "connector",
    "time.precision.mode": "adaptive",
}
_CHANGES_RECORDS = re.compile(
    r"column\.(include|exclude)\.list|column\.(mask|truncate)\..*|converters|post\.processors"
    r"|producer\.override\.partitioner\..*|message\.prefix\.(include|exclude)\.list",
    re.DOTALL,
)
_HARMLESS_SKIPS = frozenset({"none", "u", "d", "t"})  # The router publishes only inserted rows.
PAYLOAD_FIELD = "payload"  # Of the envelope.
_UTF_8 = ("utf-8", "utf8")
# Allowed values of a converter's properties, in any case. Debezium's schemas contain column defaults, so nulls matter.
_CONVERTER_VALUES = {
    "converter.encoding": _UTF_8,
    "decimal.format": ("base64",),
    "encoding": _UTF_8,
    "replace.null.with.default": ("true",),
}
_CONVERTER_KNOWN = frozenset({"schemas.cache.size", "schemas.enable", *_CONVERTER_VALUES})
_DELEGATE = "delegate.converter.type"  # How the BinaryDataConverter writes values other than bytes: no events.
_NOT_STORABLE = re.compile("[\0\ud800-\udfff]")  # Postgres cannot store NUL, and UTF-8 has no lone surrogates.
_PLAIN_TABLE = re.compile(r"[^.\\,|()\[\]*+?{}^]+\.[^.\\,|()\[\]*+?{}^]+")
_STRING = "org.apache.kafka.connect.storage.StringConverter"
_BINARY_DATA = "io.debezium.converters.BinaryDataConverter"
_BYTES = ("org.apache.kafka.connect.converters.ByteArrayConverter", _BINARY_DATA)
_JSON = "org.apache.kafka.connect.json.JsonConverter"
_SIMPLE_HEADER = "org.apache.kafka.connect.storage.SimpleHeaderConverter"


class InvalidConnector(UserError):
    """A connector's configuration is not valid, or not supported. The message is one printable line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Form(Enum):
    """How a converter writes a value."""

    TEXT = "text"
    BYTES = "bytes"
    JSON = "json"  # Without a schema.


@dataclass(frozen=True, slots=True)
class AdditionalColumn:
    """A column whose value the record has beside key and payload, under a name: a header, or a field of the value."""

    column: str
    name: str


@dataclass(frozen=True, slots=True)
class EventRouter:
    """How the router makes a record of a row.

    Args:
        schema: the table's schema.
        table: the table's name, without its schema.
        id_column: its value becomes the header `id`.
        key_column: its value becomes the record's key.
        payload_column: its value becomes the record's value.
        route_column: its value becomes the middle of the topic's name.
        topic_prefix: the beginning of the topic's name.
        topic_suffix: the end of the topic's name.
        headers: further headers, in their order.
        envelope: what an object around the payload holds beside it, in this order; empty: the payload is the value.
        partition_column: its value is the number of the record's partition. None: the key decides.
        key_form: how keys are written.
        value_form: how values are written.
        expands_json: whether a JSON payload is written as JSON, and not as a string that contains it.
        blank_is_tombstone: whether a payload without visible characters becomes a tombstone.
        timestamp_column: its value becomes the record's timestamp. None: the time at which Debezium read the row.
        publication: the publication that the connector reads; None if its plug-in uses none.
        makes_publication: whether the connector adds the table to its publication when it starts.
        slot: the connector's replication slot.
        bytes_only: the property of a converter that writes nothing but bytes, and so fails at WAL messages; None if
            there is none.
    """

    schema: str
    table: str
    id_column: str
    key_column: str
    payload_column: str
    route_column: str
    topic_prefix: str
    topic_suffix: str
    headers: tuple[AdditionalColumn, ...]
    envelope: tuple[AdditionalColumn, ...]
    partition_column: str | None
    key_form: Form
    value_form: Form
    expands_json: bool
    blank_is_tombstone: bool
    timestamp_column: str | None
    publication: str | None
    makes_publication: bool
    slot: str
    bytes_only: str | None


def event_router(connector: Mapping[str, object]) -> EventRouter:
    """Read a connector's configuration, in the forms in which Kafka Connect's REST interface takes and shows it.

    Args:
        connector: either the properties, or a mapping that has them as `config`.

    Raises:
        InvalidConnector: it is not a Postgres connector with the event router, or asks for something unsupported.
    """
    inner = connector.get("config", connector)
    if not isinstance(inner, Mapping):
        raise InvalidConnector(f"config: expected an object with the properties (given: {_kind(inner)})")
    properties = {str(name): _text(str(name), value) for name, value in inner.items()}
    # To Kafka Connect, null means not set.
    return _Reader({name: text for name, text in properties.items() if text is not None}).read()


def _text(name: str, value: object) -> str | None:
    """A property's value as text; None if it is null.

    Raises:
        InvalidConnector: the value has another type, or it or the name has characters that no property can have. The
            message does not show the value, which may be a password.
    """
    if value is not None and not isinstance(value, str | int | float):
        raise InvalidConnector(f"{name}: expected a text, a number or true or false (given: {_kind(value)})")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if refused := _NOT_STORABLE.search(name + text):
        raise InvalidConnector(
            f"{name}: expected a name and a value without NUL and without lone surrogates (given: {refused.group()!r})"
        )
    return None if value is None else text


def _kind(value: object) -> str:
    """The kind of the value, for a message that must not show it."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else type(value).__name__


class _Reader:
    def __init__(self, properties: Mapping[str, str]) -> None:
        self._properties = properties
        self._router = ""  # The prefix of the router's properties.

    def read(self) -> EventRouter:
        self._expect("connector.class", _CONNECTOR)
        self._router = self._router_prefix()
        self._expect_known()
        self._expect_whole_rows()
        for name, value in _DEFAULTS.items():
            self._expect_in_any_case(name, value)
        schema, table = self._table()
        prefix, suffix = self._topic()
        placed = self._additional_columns()
        partitions = [each.column for each in placed["partition"]]
        return EventRouter(
            schema=schema,
            table=table,
            id_column=self._routers("table.field.event.id", "id"),
            key_column=self._routers("table.field.event.key", self._routers("table.field.payload.id", "aggregateid")),
            payload_column=self._routers("table.field.event.payload", self._routers("table.field.payload", "payload")),
            route_column=self._routers("route.by.field", "aggregatetype"),
            topic_prefix=prefix,
            topic_suffix=suffix,
            headers=tuple(placed["header"]),
            envelope=tuple(placed["envelope"]),
            partition_column=partitions[-1] if partitions else None,
            key_form=self._form("key.converter"),
            value_form=self._form("value.converter"),
            expands_json=self._flag("table.expand.json.payload"),
            blank_is_tombstone=self._flag("route.tombstone.on.empty.payload"),
            timestamp_column=self._routers("table.field.event.timestamp", "") or None,
            publication=self._publication(),
            makes_publication=self._properties.get("publication.autocreate.mode", "all_tables") != "disabled",
            slot=self._properties.get("slot.name", "debezium"),
            bytes_only=self._bytes_only(),
        )

    def _router_prefix(self) -> str:
        names = [name.strip() for name in self._properties.get("transforms", "").split(",") if name.strip()]
        routers = [name for name in names if self._properties.get(f"transforms.{name}.type") == _ROUTER]
        if len(routers) != 1 or len(names) != 1:
            raise InvalidConnector(
                f"transforms: expected the outbox event router and no other transformation (given: {names})"
            )
        if predicate := self._properties.get(f"transforms.{routers[0]}.predicate"):
            raise InvalidConnector(
                f"transforms.{routers[0]}.predicate: expected none, all rows of the table are events "
                f"(given: {predicate!r})"
            )
        return f"transforms.{routers[0]}."

    def _expect_known(self) -> None:
        for name in self._properties:
            if name.startswith(self._router) and name.removeprefix(self._router) not in _KNOWN:
                raise InvalidConnector(f"{name}: is not supported (given: {self._properties[name]!r})")

    def _expect_whole_rows(self) -> None:
        """Raises InvalidConnector if Debezium omits, changes or converts columns, or skips inserted rows."""
        for name, given in self._properties.items():
            if _CHANGES_RECORDS.fullmatch(name):
                raise InvalidConnector(f"{name}: expected none, rows are relayed as they are (given: {given!r})")
        skipped = self._properties.get("skipped.operations", "none")
        if not {operation.strip().lower() for operation in skipped.split(",")} <= _HARMLESS_SKIPS:
            raise InvalidConnector(
                f"skipped.operations: expected u, d, t or none, all inserted rows are events (given: {skipped!r})"
            )

    def _table(self) -> tuple[str, str]:
        given = self._properties.get("table.include.list", "")
        name = given.replace("\\.", ".")
        if not _PLAIN_TABLE.fullmatch(name):
            raise InvalidConnector(
                f"table.include.list: expected the outbox's table alone, as schema.table (given: {given!r})"
            )
        schema, table = name.split(".")
        return schema, table

    def _topic(self) -> tuple[str, str]:
        self._expect(f"{self._router}route.topic.regex", _ANY_VALUE, default=_ANY_VALUE)
        replacement = self._routers("route.topic.replacement", f"outbox.event.{_ROUTED_VALUE}")
        prefix, found, suffix = replacement.partition(_ROUTED_VALUE)
        if not found or "$" in prefix + suffix or "\\" in replacement:
            raise InvalidConnector(
                f"{self._router}route.topic.replacement: expected a name with {_ROUTED_VALUE} in it, once "
                f"(given: {replacement!r})"
            )
        return prefix, suffix

    def _additional_columns(self) -> dict[str, list[AdditionalColumn]]:
        """The columns of each placement, in their order."""
        name = f"{self._router}table.fields.additional.placement"
        self._expect("header.converter", _SIMPLE_HEADER, _STRING, default=_SIMPLE_HEADER)
        self._expect_plain_converter("header.converter")
        placed: dict[str, list[AdditionalColumn]] = {"header": [], "envelope": [], "partition": []}
        for given in filter(None, map(str.strip, self._properties.get(name, "").split(","))):
            column, _, rest = given.partition(":")
            placement, _, alias = rest.partition(":")
            if not column or placement.lower() not in placed or ":" in alias:
                raise InvalidConnector(
                    f"{name}: expected column:header, column:envelope or column:partition, and perhaps :name "
                    f"(given: {given!r})"
                )
            placed[placement.lower()].append(AdditionalColumn(column, alias or column))
        fields = [PAYLOAD_FIELD, *(each.name for each in placed["envelope"])]
        if repeated := next((field for place, field in enumerate(fields) if field in fields[:place]), None):
            raise InvalidConnector(
                f"{name}: expected fields with different names in the envelope, which has {PAYLOAD_FIELD!r}, too "
                f"(given twice: {repeated!r})"
            )
        return placed

    def _form(self, name: str) -> Form:
        given = self._properties.get(name)
        if given is None:
            raise InvalidConnector(f"{name}: is not set; add the value of the Connect worker")
        self._expect(name, _STRING, *_BYTES, _JSON)
        self._expect_plain_converter(name)
        if given == _JSON:
            self._expect(f"{name}.schemas.enable", "false", default="true")
            return Form.JSON
        return Form.BYTES if given in _BYTES else Form.TEXT

    def _expect_plain_converter(self, converter: str) -> None:
        """Raises InvalidConnector if a property of the converter may change what it writes."""
        for name in self._properties:
            if not name.startswith(f"{converter}."):
                continue
            rest = name.removeprefix(f"{converter}.")
            if rest.startswith(_DELEGATE) and self._properties.get(converter) == _BINARY_DATA:
                continue
            if rest not in _CONVERTER_KNOWN:
                raise InvalidConnector(
                    f"{name}: is not supported, expected one of {', '.join(sorted(_CONVERTER_KNOWN))} "
                    f"(given: {self._properties[name]!r})"
                )
            if rest in _CONVERTER_VALUES:
                self._expect_in_any_case(name, *_CONVERTER_VALUES[rest])

    def _bytes_only(self) -> str | None:
        for name in ("key.converter", "value.converter"):
            if self._properties[name] in _BYTES and f"{name}.{_DELEGATE}" not in self._properties:
                return name
        return None

    def _publication(self) -> str | None:
        if self._properties.get("plugin.name", "decoderbufs") != "pgoutput":
            return None
        return self._properties.get("publication.name", "dbz_publication")

    def _flag(self, name: str) -> bool:
        self._expect(f"{self._router}{name}", "true", "false", default="false")
        return self._routers(name, "false") == "true"

    def _routers(self, name: str, default: str) -> str:
        return self._properties.get(f"{self._router}{name}", default)

    def _expect(self, name: str, *values: str, default: str | None = None) -> None:
        """Raises InvalidConnector unless a property has one of the `values`."""
        given = self._properties.get(name, default)
        if given not in values:
            raise InvalidConnector(f"{name}: expected {' or '.join(values)} (given: {given!r})")

    def _expect_in_any_case(self, name: str, *values: str) -> None:
        """Raises InvalidConnector if a property is set and has none of the `values`, which are in lower case."""
        given = self._properties.get(name, values[0])
        if given.strip().lower() not in values:
            raise InvalidConnector(f"{name}: expected {' or '.join(values)} (given: {given!r})")
