"""What a harvester makes of its settings before anything is connected."""

from __future__ import annotations

import pytest

from outbox_plugin import Settings
from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.harvester import may_take_over_early


@pytest.mark.parametrize(
    ("delivery", "leader_topic", "leader_group", "early"),
    [
        ("exactly-once", None, None, True),
        ("at-least-once", None, None, True),
        ("at-least-once", "neli", None, False),
        ("at-least-once", None, "neli", False),
    ],
)
def test_an_election_that_is_shared_with_goharvest_knows_no_early_takeover(
    delivery: Delivery, leader_topic: str | None, leader_group: str | None, early: bool
) -> None:
    settings = Settings(
        dsn="postgresql://u@h/d",
        bootstrap_servers="h:1",
        delivery=delivery,
        leader_topic=leader_topic,
        leader_group=leader_group,
    )
    assert may_take_over_early(settings) == early
