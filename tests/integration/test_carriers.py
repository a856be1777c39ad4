"""The asset that consumes by coordination: each materialization goes on where the last one ended."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer
from dagster import DagsterInstance, ExecuteInProcessResult, materialize

from definitions import carriers
from outbox_plugin import Settings
from outbox_plugin.dagster import OutboxResource

pytestmark = pytest.mark.integration


def run(settings: Settings, *, raise_on_error: bool = True) -> ExecuteInProcessResult:
    with DagsterInstance.ephemeral() as instance:
        outbox = OutboxResource(dsn=settings.dsn.get_secret_value(), bootstrap_servers=settings.bootstrap_servers)
        return materialize(
            [carriers.departures_per_carrier],
            instance=instance,
            resources={"outbox": outbox},
            raise_on_error=raise_on_error,
        )


def materialized(settings: Settings) -> dict[str, Any]:
    [materialization] = run(settings).asset_materializations_for_node("departures_per_carrier")
    return {name: value.value for name, value in materialization.metadata.items()}


def depart(settings: Settings, topic: str, *codes: str) -> None:
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for number, code in enumerate(codes):
        producer.produce(topic, json.dumps({"carrier": code, "number": number}), key=str(number))
    assert producer.flush(20) == 0
    producer.close()


def test_each_run_goes_on_where_the_last_one_ended(
    settings: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carriers, "TOPIC", topic)
    depart(settings, topic, "UA", "UA", "B6", "DL")
    assert materialized(settings) == {"events": 4, "carriers": {"UA": 2, "B6": 1, "DL": 1}}
    depart(settings, topic, "UA", "AA")
    assert materialized(settings) == {"events": 2, "carriers": {"UA": 1, "AA": 1}}


def test_what_a_run_has_counted_that_fails_is_counted_by_the_next_one(
    settings: Settings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carriers, "TOPIC", topic)
    depart(settings, topic, "UA", "UA", "B6", "DL")
    left = [True] * 3

    def fails(text: bytes) -> Any:
        if not left:
            raise OSError("the run fails half-way")
        left.pop()
        return json.loads(text)

    with monkeypatch.context() as patched:
        patched.setattr(carriers, "json", SimpleNamespace(loads=fails))
        assert not run(settings, raise_on_error=False).success
    assert not left
    assert materialized(settings) == {"events": 4, "carriers": {"UA": 2, "B6": 1, "DL": 1}}
