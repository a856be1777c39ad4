"""A Debezium connector's configuration, read: what is followed, and what is refused with one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outbox_plugin.debezium.command import _router
from outbox_plugin.debezium.event_router import AdditionalColumn, EventRouter, Form, InvalidConnector, event_router
from outbox_plugin.debezium.outbox_view import Column, OutboxView

STRING = "org.apache.kafka.connect.storage.StringConverter"
BINARY = "io.debezium.converters.BinaryDataConverter"
JSON = "org.apache.kafka.connect.json.JsonConverter"
LEAST = {
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "plugin.name": "pgoutput",
    "table.include.list": "shop.outboxevent",
    "transforms": "outbox",
    "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
    "key.converter": STRING,
    "value.converter": STRING,
}
COLUMNS = [
    Column("id", "uuid"),
    Column("aggregatetype", "character varying(255)"),
    Column("aggregateid", "character varying(255)"),
    Column("type", "character varying(255)"),
    Column("payload", "jsonb"),
    Column("size", "integer"),
    Column("measured", "double precision"),
    Column("at", "timestamp(6) without time zone"),
    Column("there", "timestamp with time zone"),
    Column("made", "integer", is_generated=True),
]


def routed(**changed: str) -> EventRouter:
    return event_router(LEAST | {name.replace("__", "."): value for name, value in changed.items()})


def of_router(name: str) -> str:
    return f"transforms.outbox.{name}"


def test_the_defaults_are_debeziums() -> None:
    assert event_router(LEAST) == EventRouter(
        schema="shop",
        table="outboxevent",
        id_column="id",
        key_column="aggregateid",
        payload_column="payload",
        route_column="aggregatetype",
        topic_prefix="outbox.event.",
        topic_suffix="",
        headers=(),
        envelope=(),
        partition_column=None,
        key_form=Form.TEXT,
        value_form=Form.TEXT,
        expands_json=False,
        blank_is_tombstone=False,
        timestamp_column=None,
        publication="dbz_publication",
        makes_publication=True,
        slot="debezium",
        bytes_only=None,
    )


@pytest.mark.parametrize("name", ["key.converter", "value.converter"])
@pytest.mark.parametrize(
    ("converter", "delegate", "fails"),
    [
        ("org.apache.kafka.connect.converters.ByteArrayConverter", "", True),
        (BINARY, "", True),
        (BINARY, "delegate.converter.type", False),
        (BINARY, "delegate.converter.type.schemas.enable", True),
    ],
)
def test_bytes_alone_cannot_be_a_message(name: str, converter: str, delegate: str, fails: bool) -> None:
    changed = {name: converter} | ({f"{name}.{delegate}": "false"} if delegate else {})
    assert event_router(LEAST | changed).bytes_only == (name if fails else None)


def test_a_configuration_with_a_name_and_json_values_is_read_too() -> None:
    config: dict[str, Any] = {**LEAST, of_router("route.tombstone.on.empty.payload"): True, "tasks.max": 1}
    assert event_router({"name": "outbox", "config": config}).blank_is_tombstone


def test_all_that_can_be_had_is_read() -> None:
    found = event_router(
        LEAST
        | {
            "transforms": "router",
            "transforms.router.type": LEAST["transforms.outbox.type"],
            "transforms.router.table.field.event.id": "event_id",
            "transforms.router.table.field.event.key": "k",
            "transforms.router.table.field.event.payload": "body",
            "transforms.router.table.field.event.timestamp": "at",
            "transforms.router.table.fields.additional.placement": (
                "type:header:eventType, size:HEADER,type:Envelope:kind,size:envelope,old:partition,size:partition:any"
            ),
            "transforms.router.route.by.field": "kind",
            "transforms.router.route.topic.replacement": "shop.${routedByValue}.v1",
            "value.converter": JSON,
            "value.converter.schemas.enable": "false",
            "transforms.router.table.expand.json.payload": "true",
            "table.include.list": r"shop\.outboxevent",
            "publication.name": "events",
            "publication.autocreate.mode": "disabled",
            "slot.name": "events_slot",
        }
    )
    assert (found.id_column, found.key_column, found.payload_column) == ("event_id", "k", "body")
    assert (found.route_column, found.topic_prefix, found.topic_suffix) == ("kind", "shop.", ".v1")
    assert found.headers == (AdditionalColumn("type", "eventType"), AdditionalColumn("size", "size"))
    assert found.envelope == (AdditionalColumn("type", "kind"), AdditionalColumn("size", "size"))
    assert found.partition_column == "size"
    assert (found.value_form, found.expands_json, found.timestamp_column) == (Form.JSON, True, "at")
    assert (found.publication, found.makes_publication, found.slot) == ("events", False, "events_slot")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("connector.class", "io.debezium.connector.mysql.MySqlConnector"),
        ("transforms", ""),
        ("transforms", "outbox,other"),
        ("transforms.outbox.type", "io.debezium.transforms.ExtractNewRecordState"),
        (of_router("predicate"), "isOutbox"),
        (of_router("table.field.event.colour"), "red"),
        ("table.include.list", "shop.outboxevent,shop.orders"),
        ("table.include.list", "shop.outbox.*"),
        ("table.include.list", "outboxevent"),
        (of_router("route.topic.regex"), "(.*)_(?<routedByValue>.*)"),
        (of_router("route.topic.replacement"), "all-events"),
        (of_router("route.topic.replacement"), "${routedByValue}.${routedByValue}"),
        (of_router("route.topic.replacement"), "$1.${routedByValue}"),
        (of_router("table.fields.additional.placement"), "type:value"),
        (of_router("table.fields.additional.placement"), "type"),
        (of_router("table.fields.additional.placement"), "type:header:one:two"),
        (of_router("table.fields.additional.placement"), "type:envelope:payload"),
        (of_router("table.fields.additional.placement"), "type:envelope,size:envelope:type"),
        (of_router("table.expand.json.payload"), "yes"),
        ("header.converter", JSON),
        ("key.converter", "io.confluent.connect.avro.AvroConverter"),
        ("value.converter", JSON),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(InvalidConnector, match=r"^transforms:" if name.endswith(".type") else f"^{name}"):
        event_router(LEAST | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("decimal.handling.mode", "string", "expected precise"),
        ("time.precision.mode", "connect", "expected adaptive"),
        ("time.precision.mode", "adaptive_time_microseconds", "expected adaptive"),
        ("binary.handling.mode", "base64", "expected bytes"),
        ("interval.handling.mode", "string", "expected numeric"),
        ("hstore.handling.mode", "map", "expected json"),
        ("field.name.adjustment.mode", "avro", "expected none"),
        ("flush.lsn.source", "false", "expected true"),
        ("converters", "isbn", "expected none"),
        ("post.processors", "reselector", "expected none"),
        ("producer.override.partitioner.class", "RoundRobin", "expected none"),
        ("message.prefix.exclude.list", "outbox.*", "expected none"),
        ("lsn.flush.mode", "manual", "expected connector"),
        ("value.converter.delegate.converter.type", "org.Json", "is not supported"),
        ("column.include.list", "shop.outboxevent.id", "expected none"),
        ("column.exclude.list", "shop.outboxevent.size", "expected none"),
        ("column.mask.with.5.chars", "shop.outboxevent.payload", "expected none"),
        ("column.mask.hash.SHA-256.with.salt.s", "shop.outboxevent.payload", "expected none"),
        ("column.truncate.to.9.chars", "shop.outboxevent.payload", "expected none"),
        ("skipped.operations", "c", "expected u, d, t or none"),
        ("skipped.operations", "u, C", "expected u, d, t or none"),
        ("key.converter.encoding", "ISO-8859-1", "expected utf-8 or utf8"),
        ("value.converter.converter.encoding", "UTF-16", "expected utf-8 or utf8"),
        ("header.converter.encoding", "ISO-8859-1", "expected utf-8 or utf8"),
        ("value.converter.decimal.format", "NUMERIC", "expected base64"),
        ("value.converter.replace.null.with.default", "false", "expected true"),
        ("key.converter.colour", "red", "is not supported, expected one of converter.encoding, "),
        ("value.converter.schema.registry.url", "http://registry", "is not supported, expected one of "),
        ("header.converter.colour", "red", "is not supported, expected one of "),
    ],
)
def test_what_changes_debeziums_records_is_refused(name: str, value: str, expected: str) -> None:
    with pytest.raises(
        InvalidConnector, match=f"^{re.escape(f'{name}: {expected}')}.*{re.escape(f'(given: {value!r})')}$"
    ):
        event_router(LEAST | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decimal.handling.mode", "precise"),
        ("decimal.handling.mode", " Precise"),
        ("time.precision.mode", "adaptive"),
        ("binary.handling.mode", "bytes"),
        ("interval.handling.mode", "numeric"),
        ("hstore.handling.mode", "json"),
        ("field.name.adjustment.mode", "none"),
        ("schema.name.adjustment.mode", "avro"),
        ("flush.lsn.source", True),
        ("skipped.operations", "t"),
        ("skipped.operations", "none"),
        ("skipped.operations", "u, d"),
        ("message.key.columns", "shop.outboxevent:id"),
        ("snapshot.mode", "never"),
        ("unavailable.value.placeholder", "?"),
        ("provide.transaction.metadata", "true"),
        ("predicates", "isOutbox"),
        ("predicates.isOutbox.type", "org.apache.kafka.connect.transforms.predicates.TopicNameMatches"),
        ("key.converter.encoding", "UTF-8"),
        ("value.converter.converter.encoding", "utf8"),
        ("header.converter.converter.encoding", "UTF8"),
        ("value.converter.schemas.enable", True),
        ("value.converter.schemas.cache.size", 10),
        ("value.converter.decimal.format", "BASE64"),
        ("value.converter.replace.null.with.default", True),
        ("column.propagate.source.type", ".*"),
    ],
)
def test_what_leaves_debeziums_records_as_they_are_is_accepted(name: str, value: object) -> None:
    assert event_router(LEAST | {name: value}) == event_router(LEAST)


def test_another_converter_is_named_before_its_properties() -> None:
    avro = {"value.converter.schema.registry.url": "u", "value.converter": "io.confluent.connect.avro.AvroConverter"}
    with pytest.raises(InvalidConnector, match=r"^value\.converter: "):
        event_router(LEAST | avro)


@pytest.mark.parametrize("name", ["publication.name", "slot.name", "column.include.list", of_router("predicate")])
def test_null_is_not_set(name: str) -> None:
    assert event_router(LEAST | {name: None}) == event_router(LEAST)


def test_null_is_no_converter() -> None:
    with pytest.raises(InvalidConnector, match=r"^value\.converter: is not set"):
        event_router(LEAST | {"value.converter": None})


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("transforms", ["outbox"], "a list"),
        ("transforms", {}, "an object"),
        ("database.password", ["secret"], "a list"),
    ],
)
def test_a_value_that_is_no_text_is_refused(name: str, value: object, given: str) -> None:
    with pytest.raises(InvalidConnector) as refused:
        event_router(LEAST | {name: value})
    assert str(refused.value) == f"{name}: expected a text, a number or true or false (given: {given})"


@pytest.mark.parametrize(("config", "given"), [(None, "null"), ([], "a list"), ("x", "str")])
def test_a_configuration_that_is_no_object_is_refused(config: object, given: str) -> None:
    with pytest.raises(InvalidConnector, match=rf"^config: .*\(given: {given}\)$"):
        event_router({"name": "outbox", "config": config})


@pytest.mark.parametrize("character", ["\0", "\ud800", chr(0xDFFF)])
@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("slot.name", "secret{}", "slot.name"),
        ("some{}thing", "secret", "some{}thing"),
        ("some{}thing", None, "some{}thing"),
        (of_router("table.field.event.id"), "secret{}", of_router("table.field.event.id")),
    ],
)
def test_a_character_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, character: str, name: str, value: str | None, named: str
) -> None:
    file = tmp_path / "connector.json"
    changed = {name.format(character): value and value.format(character)}
    file.write_text(json.dumps({"config": LEAST | changed}))
    with pytest.raises(InvalidConnector) as refused:
        _router(file)
    escape = character.encode("unicode_escape").decode()
    assert str(refused.value) == (
        f"{file}: {named.format(escape)}: expected a name and a value without NUL and without lone surrogates "
        f"(given: '{escape}')"
    )


def test_a_name_with_control_characters_is_shown_on_one_line() -> None:
    with pytest.raises(InvalidConnector, match=r"^value\.converter\.a\\nb\\x1b: is not supported"):
        event_router(LEAST | {"value.converter.a\nb\x1b": "red"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[" * 100_000,
            "expected a JSON object with the connector's properties (given: lists or objects, nested too deep)",
        ),
        ('{"config":' * 100_000, "nested too deep"),
        ('{"slot.name": ' + "[" * 500 + "]" * 500 + "}", "slot.name: expected a text"),
        ('{"config": ' + "[" * 500 + "]" * 500 + "}", "config: expected an object"),
        ("[]", "expected a JSON object with the connector's properties"),
        ("{", "expected JSON: "),
        ("\ud800", "expected JSON: "),
        ('{"tasks.max": ' + "1" * 5_000 + "}", "expected JSON: "),
    ],
    ids=["lists", "objects", "deep value", "deep config", "list", "half", "surrogate", "digits"],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "connector.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidConnector) as refused:
        _router(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert said in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("missing", ["key.converter", "value.converter", "connector.class"])
def test_what_the_worker_may_have_must_be_said(missing: str) -> None:
    with pytest.raises(InvalidConnector, match=f"^{missing}: "):
        event_router({name: value for name, value in LEAST.items() if name != missing})


def test_a_view_whose_columns_postgres_cannot_replace_is_refused() -> None:
    """The value of the one that is there is a text, and a connector of bytes makes bytes of it."""
    present = [Column("id", "bigint"), Column("create_time", "timestamp with time zone"), Column("kafka_topic", "text")]
    present += [Column("kafka_key", "text"), Column("kafka_value", "text")]
    changed = {"value.converter": "org.apache.kafka.connect.converters.ByteArrayConverter"}
    view = OutboxView(
        event_router(LEAST | changed | {of_router("table.field.event.payload"): "raw"}),
        [*COLUMNS, Column("raw", "bytea")],
        (),
        ("shop", "relayed"),
        present,
    )
    with pytest.raises(InvalidConnector, match=r'"shop"\."relayed" has the column \'kafka_value\' of the type text'):
        view.preparation()
    assert OutboxView(event_router(LEAST), COLUMNS, (), ("shop", "relayed"), present).preparation()


def test_a_plug_in_without_publications_is_refused_when_it_comes_to_that() -> None:
    view = OutboxView(event_router(LEAST | {"plugin.name": "decoderbufs"}), COLUMNS, (), ("shop", "relayed"))
    assert view.preparation()
    with pytest.raises(InvalidConnector, match=r"^plugin\.name: expected 'pgoutput'"):
        view.switch()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (of_router("table.field.event.id"), "no_such", "has no column 'no_such'"),
        (of_router("table.field.event.key"), "measured", "'measured', of the type double precision"),
        (of_router("table.fields.additional.placement"), "measured:header", "'measured' is of the type double"),
        (of_router("table.fields.additional.placement"), "made:header", "'made' is generated"),
        (of_router("table.fields.additional.placement"), "made:partition", "'made' is generated"),
        (of_router("table.fields.additional.placement"), "type:envelope", "expected value.converter to be the Json"),
        (of_router("table.fields.additional.placement"), "id:partition", "Debezium takes only an integer"),
        (of_router("route.by.field"), "size", "'size' is of the type integer, expected a text"),
        (of_router("table.field.event.timestamp"), "no_such", "has no column 'no_such'"),
        (of_router("table.field.event.timestamp"), "there", "only a timestamp without time zone"),
        ("key.converter", "org.apache.kafka.connect.converters.ByteArrayConverter", "'aggregateid', of the type char"),
        (of_router("table.expand.json.payload"), "true", "expected value.converter to be the JsonConverter"),
        ("value.converter", "org.apache.kafka.connect.converters.ByteArrayConverter", "'payload', of the type jsonb"),
    ],
)
def test_a_table_without_what_the_router_reads_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(InvalidConnector, match=said):
        OutboxView(event_router(LEAST | {name: value}), COLUMNS, (), ("shop", "relayed"))


def test_a_number_with_a_fraction_is_refused_in_an_envelope() -> None:
    """Kafka Connect's JSON has it in Base64."""
    placed = {of_router("table.fields.additional.placement"): "price:envelope"}
    router = event_router(LEAST | placed | {"value.converter": JSON, "value.converter.schemas.enable": "false"})
    columns = [*COLUMNS, Column("price", "numeric(10,2)")]
    with pytest.raises(InvalidConnector, match=r"'price' is of the type numeric\(10,2\)"):
        OutboxView(router, columns, (), ("shop", "relayed"))


def test_the_sql_is_read_as_utf_8_whatever_the_terminal_has() -> None:
    statements = [each.as_string() for each in OutboxView(routed(), COLUMNS, (), ("shop", "relayed")).preparation()]
    assert statements[0] == "SET client_encoding = 'UTF8'"


def test_names_of_a_long_table_stay_apart() -> None:
    """From each other, and from those of another table that begins with the same letters."""
    names = [
        name
        for table in ("t" * 63, "t" * 62 + "x", "t" * 50)
        for each in OutboxView(
            event_router(LEAST | {"table.include.list": f"shop.{table}"}), COLUMNS, (), ("shop", "relayed")
        ).preparation()
        for name in set(re.findall(r'"(t+[^"]*_outbox_[^"]*)"', each.as_string()))
        if each.as_string().startswith(("CREATE SEQUENCE", "CREATE UNIQUE", "CREATE OR REPLACE FUNCTION"))
    ]
    assert len(set(names)) == 12
    assert max(map(len, names)) <= 63


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"value.converter": JSON, "value.converter.schemas.enable": "false"}, ["emoji"]),
        (
            {
                "value.converter": JSON,
                "value.converter.schemas.enable": "false",
                of_router("table.expand.json.payload"): "true",
                of_router("table.field.event.timestamp"): "at",
            },
            ["null fields", "before 1970"],
        ),
    ],
)
def test_it_says_what_differs(changed: dict[str, str], said: list[str]) -> None:
    differences = OutboxView(event_router(LEAST | changed), COLUMNS, (), ("shop", "relayed")).differences
    assert [word for word, sentence in zip(said, differences, strict=True) if word in sentence] == said
