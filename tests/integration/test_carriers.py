"""The asset that consumes by coordination: each materialization goes on where the last one ended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer
from dagster import DagsterInstance, materialize

from definitions import carriers
from outbox_plugin import Settings
from outbox_plugin.dagster import OutboxResource

pytestmark = pytest.mark.integration


def materialized(settings: Settings) -> dict[str, Any]:
    with DagsterInstance.ephemeral() as instance:
        outbox = OutboxResource(dsn=settings.dsn.get_secret_value(), bootstrap_servers=settings.bootstrap_servers)
        result = materialize([carriers.departures_per_carrier], instance=instance, resources={"outbox": outbox})
    [materialization] = result.asset_materializations_for_node("departures_per_carrier")
    return {name: value.value for name, value in materialization.metadata.items()}


def test_each_run_goes_on_where_the_last_one_ended(
    settings: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carriers, "TOPIC", topic)

    def depart(*codes: str) -> None:
        producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
        for number, code in enumerate(codes):
            producer.produce(topic, json.dumps({"carrier": code, "number": number}), key=str(number))
        assert producer.flush(20) == 0
        producer.close()

    depart("UA", "UA", "B6", "DL")
    assert materialized(settings) == {"events": 4, "carriers": {"UA": 2, "B6": 1, "DL": 1}}
    depart("UA", "AA")
    assert materialized(settings) == {"events": 2, "carriers": {"UA": 1, "AA": 1}}
