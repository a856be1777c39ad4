"""A Debezium connector's configuration, read: what is followed, and what is refused with one line."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_plugin.debezium.event_router import EventRouter, Form, HeaderColumn, InvalidConnector, event_router
from outbox_plugin.debezium.outbox_view import Column, OutboxView

STRING = "org.apache.kafka.connect.storage.StringConverter"
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
    Column("id", "uuid", False),
    Column("aggregatetype", "character varying(255)", False),
    Column("aggregateid", "character varying(255)", False),
    Column("type", "character varying(255)", False),
    Column("payload", "jsonb", False),
    Column("size", "integer", True),
    Column("measured", "double precision", False),
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
        key_form=Form.TEXT,
        value_form=Form.TEXT,
        expands_json=False,
        blank_is_tombstone=False,
        timestamp_column=None,
        publication="dbz_publication",
        makes_publication=True,
        slot="debezium",
    )


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
            "transforms.router.table.fields.additional.placement": "type:header:eventType, size:HEADER",
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
    assert found.headers == (HeaderColumn("type", "eventType"), HeaderColumn("size", "size"))
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
        (of_router("table.fields.additional.placement"), "type:envelope"),
        (of_router("table.fields.additional.placement"), "type:partition"),
        (of_router("table.fields.additional.placement"), "type"),
        (of_router("table.expand.json.payload"), "yes"),
        ("header.converter", JSON),
        ("key.converter", "io.confluent.connect.avro.AvroConverter"),
        ("value.converter", JSON),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(InvalidConnector, match=r"^transforms:" if name.endswith(".type") else f"^{name}"):
        event_router(LEAST | {name: value})


@pytest.mark.parametrize("missing", ["key.converter", "value.converter", "connector.class"])
def test_what_the_worker_may_have_must_be_said(missing: str) -> None:
    with pytest.raises(InvalidConnector, match=f"^{missing}: "):
        event_router({name: value for name, value in LEAST.items() if name != missing})


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
        (of_router("route.by.field"), "size", "'size' is of the type integer, expected a text"),
        (of_router("table.expand.json.payload"), "true", "expected value.converter to be the JsonConverter"),
        ("value.converter", "org.apache.kafka.connect.converters.ByteArrayConverter", "'payload', of the type jsonb"),
    ],
)
def test_a_table_without_what_the_router_reads_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(InvalidConnector, match=said):
        OutboxView(event_router(LEAST | {name: value}), COLUMNS, (), ("shop", "relayed"))


def test_a_value_that_postgres_makes_is_not_written_back() -> None:
    view = OutboxView(event_router(LEAST), COLUMNS, (), ("shop", "relayed"))
    [kept] = [text for each in view.preparation() if "RETURNS trigger" in (text := each.as_string())]
    assert '"measured"' in kept
    assert '"size"' not in kept


def test_names_of_a_long_table_stay_apart() -> None:
    router = event_router(LEAST | {"table.include.list": f"shop.{'t' * 63}"})
    text = "\n".join(each.as_string() for each in OutboxView(router, COLUMNS, (), ("shop", "relayed")).preparation())
    for suffix in ("_outbox_place_seq", "_outbox_place_key", "_outbox_kept"):
        assert f'"{"t" * (63 - len(suffix))}{suffix}"' in text


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
            ["null fields", "timestamp"],
        ),
    ],
)
def test_it_says_what_differs(changed: dict[str, str], said: list[str]) -> None:
    differences = OutboxView(event_router(LEAST | changed), COLUMNS, (), ("shop", "relayed")).differences
    assert [word for word, sentence in zip(said, differences, strict=True) if word in sentence] == said
