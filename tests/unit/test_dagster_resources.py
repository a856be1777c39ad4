"""A resource is one outbox, whatever the environment names."""

from __future__ import annotations

import json

import pytest

from outbox_plugin.dagster import OutboxResource, RangeConfig
from outbox_plugin.errors import InvalidSetting, RangeRefused

SERVERS = {"dsn": "postgresql://app@127.0.0.1:1/shop", "bootstrap_servers": "127.0.0.1:1"}


def test_the_outboxes_of_the_environment_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_OUTBOXES", json.dumps([{"group": "a"}, {"group": "b", "table": "other"}]))
    settings = OutboxResource(**SERVERS, table="shop.outbox", group="shop").settings()
    assert [(each.table, each.group) for each in settings.each()] == [("shop.outbox", "shop")]


@pytest.mark.parametrize("table", ["tenant_*.outbox", None])
def test_a_pattern_is_refused_in_one_line(table: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TABLE", "tenant_*.outbox")
    resource = OutboxResource(**SERVERS, table=table)
    with pytest.raises(InvalidSetting, match=r"^OUTBOX_TABLE: a resource is one outbox, so name one table"):
        resource.settings()


@pytest.mark.parametrize("name", ["dsn", "bootstrap_servers", "table", "group"])
def test_an_empty_text_does_not_stand_for_another_outbox(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a variable that is empty: the one of the environment may be another outbox's."""
    monkeypatch.setenv(f"OUTBOX_{name.upper()}", "postgresql://app@127.0.0.1:1/other" if name == "dsn" else "other")
    resource = OutboxResource(**{**SERVERS, name: ""})
    with pytest.raises(InvalidSetting, match=rf"^OUTBOX_{name.upper()}: the resource's {name} is empty: set the var"):
        resource.settings()


def test_a_partition_that_is_no_number_is_named_wherever_it_stands() -> None:
    config = RangeConfig(consumer="totals", topic="orders", topic_id="x", begin={"0": 1}, end={"first": 2})
    with pytest.raises(RangeRefused, match=r"^totals: partitions are numbers \(given: 0, first\)$"):
        config.range()
