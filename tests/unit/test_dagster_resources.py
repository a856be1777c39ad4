"""A resource is one outbox, whatever the environment names."""

from __future__ import annotations

import json

import pytest

from outbox_plugin.dagster import OutboxResource
from outbox_plugin.errors import InvalidSetting

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
