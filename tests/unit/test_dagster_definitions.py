"""The definitions of an outbox beside a project's own: no name of theirs is one that the project needs."""

from __future__ import annotations

import pytest
from dagster import AssetKey, Definitions, asset

from outbox_plugin.dagster import HarvesterResource, OutboxResource, Topic, build_outbox_definitions

OUTBOX = OutboxResource(dsn="postgresql://db/shop", bootstrap_servers="kafka:9092")


@asset
def orders() -> None:
    """It emits."""


@asset
def orders_events() -> None:
    """Its name is that of the emitting asset, and more."""


@asset
def second_orders() -> None:
    """Its name is that of the emitting asset, behind the prefix of the second outbox."""


@pytest.mark.parametrize("neighbour", [orders_events, second_orders])
def test_an_asset_may_have_any_name_beside_one_that_emits(neighbour: object) -> None:
    emitters = [Topic("orders", [orders, AssetKey("second_orders")])]
    first = build_outbox_definitions(HarvesterResource(outbox=OUTBOX), emitters)
    others = [Topic("others", [orders])]
    second = build_outbox_definitions(HarvesterResource(outbox=OUTBOX), others, prefix="second_")
    project = Definitions(assets=[orders, neighbour])  # type: ignore[list-item]
    Definitions.validate_loadable(Definitions.merge(project, first, second))
