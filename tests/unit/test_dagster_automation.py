"""Dagster's automation conditions on assets downstream of a topic."""

from __future__ import annotations

from typing import Any

import pytest
from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    DagsterInstance,
    evaluate_automation_conditions,
)

from outbox_plugin.dagster import Topic
from tests.documents import blocks

pytestmark = pytest.mark.filterwarnings("ignore:.* is currently in beta")  # Dagster's own calls.


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://app@db/shop")
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "kafka:9092")


def test_an_asset_downstream_of_a_topic_runs_when_the_topic_has_new_records() -> None:
    """The automation condition of the page, with the events by which the harvester's sensor reports on a topic."""
    [block] = [each for each in blocks("how-to/declare-in-dagster.md", "python") if "AutomationCondition" in each.text]
    names: dict[str, Any] = {}
    exec(compile(block.text, "declare-in-dagster.md", "exec", dont_inherit=True), names)
    topic, report = Topic("orders").key, AssetKey("order_report")
    with DagsterInstance.ephemeral() as instance:
        cursor = None

        def requested() -> int:
            nonlocal cursor
            done = evaluate_automation_conditions(names["definitions"], instance, cursor=cursor)
            cursor = done.cursor
            return done.total_requested

        assert requested() == 0
        instance.report_runless_asset_event(AssetMaterialization(topic))
        assert [requested(), requested()] == [1, 0]
        instance.report_runless_asset_event(AssetMaterialization(report))
        instance.report_runless_asset_event(AssetObservation(topic))  # The topic stands still.
        assert requested() == 0
        instance.report_runless_asset_event(AssetMaterialization(topic))
        assert requested() == 1
