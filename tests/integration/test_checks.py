"""Checks that fail as they should: blocking what is downstream, naming what Kafka refused, going stale."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import timedelta
from functools import partial

import psycopg
import pytest
from dagster import (
    AssetCheckSeverity,
    AssetKey,
    AssetMaterialization,
    DagsterInstance,
    Definitions,
    ExecuteInProcessResult,
    MaterializeResult,
    asset,
)
from dagster._core.definitions import freshness_evaluator
from dagster._core.definitions.freshness import FreshnessState
from dagster._core.loader import LoadingContextForTest

from outbox_plugin import Event, Harvester, Outbox, Settings
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.dagster import (
    Limits,
    Topic,
    build_outbox_checks,
    build_outbox_definitions,
    build_topic_check,
    checks,
    topic_position,
)
from outbox_plugin.dagster.checks import build_dead_letter_check
from outbox_plugin.dagster.daemon_supervision import LONGEST_SECONDS
from outbox_plugin.errors import ServerRefused
from outbox_plugin.status.reader import read_status
from outbox_plugin.verification import topic_ends
from tests.dagster_support import HARVESTER, resources
from tests.harvesting import insert
from tests.support import eventually

pytestmark = pytest.mark.integration

TOO_LARGE = "x" * 2_000_000  # More than the client and the broker take.


def ran(settings: Settings, topic: str, *, blocking: bool) -> tuple[ExecuteInProcessResult, list[str]]:
    """A run of an asset that emits and one downstream, while nothing harvests; and which of them were materialized."""
    outbox, _ = resources(settings)

    @asset
    def emitter() -> MaterializeResult[None]:
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            Outbox().emit(connection, Event(topic=topic, key="k", value=1))
        return MaterializeResult()

    @asset(deps=[emitter])
    def downstream() -> None: ...

    drained = build_outbox_checks(emitter.key, topics=[topic], drain_seconds=1.0, blocking=blocking)
    definitions = Definitions(assets=[emitter, downstream], asset_checks=drained, resources={"outbox": outbox})
    with DagsterInstance.ephemeral() as instance:
        job = definitions.resolve_implicit_global_asset_job_def()
        done = job.execute_in_process(instance=instance, raise_on_error=False)
    return done, [
        event.asset_key.to_user_string() for event in done.get_asset_materialization_events() if event.asset_key
    ]


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({"bootstrap_servers": "127.0.0.1:1"}, ["consumed_in_full", "events_exactly_once", "events_in_order"]),
        (
            {"dsn": "postgresql://127.0.0.1:1/x"},
            ["consumed_in_full", "events_exactly_once", "events_in_order", "outbox_drained"],
        ),
    ],
)
def test_a_check_that_cannot_ask_a_server_fails_and_says_so(
    settings: Settings, topic: str, changed: dict[str, str], failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the check that fails, as `healthy` does then, and not its step, whose traceback nobody can act on."""
    monkeypatch.setattr(topic_ends, "LIST_SECONDS", 2.0)
    monkeypatch.setattr(topic_position, "topic_state", partial(topic_state, seconds=2.0))
    outbox, _ = resources(Settings(**{**settings.model_dump(), "dsn": settings.dsn.get_secret_value(), **changed}))
    emitted = build_outbox_checks(AssetKey("orders"), topics=[topic], drain_seconds=1.0)
    definitions = Definitions(
        asset_checks=[*emitted, build_topic_check(topic, AssetKey("totals"))], resources={"outbox": outbox}
    )
    with DagsterInstance.ephemeral() as instance:
        done = definitions.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    found = [each for each in done.get_asset_check_evaluations() if not each.passed]
    assert sorted(each.check_name for each in found) == failed
    [setting] = changed
    for each in found:
        assert each.severity is AssetCheckSeverity.ERROR
        assert f", as OUTBOX_{setting.upper()} names it" in str(each.description)
        assert f"can be reached from here by OUTBOX_{setting.upper()}" in str(each.metadata["what_to_do"].value)


def test_what_is_downstream_waits_for_the_outbox_to_drain_on_request(settings: Settings, topic: str) -> None:
    done, materialized = ran(settings, topic, blocking=True)
    assert (done.success, materialized) == (False, ["emitter"])


def test_what_is_downstream_goes_on_otherwise(settings: Settings, topic: str) -> None:
    done, materialized = ran(settings, topic, blocking=False)
    assert (done.success, materialized) == (True, ["emitter", "downstream"])
    [drained] = [each for each in done.get_asset_check_evaluations() if each.check_name == "outbox_drained"]
    assert (drained.passed, drained.severity) == (False, AssetCheckSeverity.ERROR)
    assert drained.description == "1 events still wait after 1 s: shard 0 has no leader"
    assert "sensor is on" in str(drained.metadata["what_to_do"].value)


@pytest.mark.parametrize(("limit", "severity"), [(100, AssetCheckSeverity.WARN), (1, AssetCheckSeverity.ERROR)])
@pytest.mark.parametrize("policy", ["park", "dead-letter"])
def test_a_row_that_kafka_refused_is_said(
    settings: Settings, topic: str, policy: str, limit: int, severity: AssetCheckSeverity
) -> None:
    insert(settings, topic, [("bad", TOO_LARGE), ("good", "1")])
    with Harvester(settings.model_copy(update={"bad_rows": policy})):
        eventually(lambda: read_status(settings).parked_keys + read_status(settings).dead_letters == 1, 60)
    outbox, _ = resources(settings)
    check = build_dead_letter_check(HARVESTER, limits=Limits(dead_letters_error=limit))
    definitions = Definitions(asset_checks=[check], resources={"outbox": outbox})
    with DagsterInstance.ephemeral() as instance:
        done = definitions.resolve_implicit_global_asset_job_def().execute_in_process(instance=instance)
    [found] = done.get_asset_check_evaluations()
    assert (found.passed, found.severity) == (False, severity)
    told = {"park": "1 keys wait behind a row that Kafka refused", "dead-letter": "1 rows that Kafka refused are dead"}
    assert told[policy] in str(found.description)


def test_a_topic_without_new_records_is_stale_as_dagster_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, harvester = resources(Settings(dsn="postgresql://db/shop", bootstrap_servers="kafka:9092"))
    topic = Topic("orders", fresh_within=timedelta(minutes=5))
    node = build_outbox_definitions(harvester, [topic]).resolve_asset_graph().get(AssetKey(["kafka", "orders"]))

    def state(later: timedelta) -> FreshnessState:
        now = time.time() + later.total_seconds()
        monkeypatch.setattr(freshness_evaluator, "get_current_timestamp", lambda: now)
        evaluator = freshness_evaluator.TimeWindowFreshnessPolicyEvaluator()
        return asyncio.run(evaluator.evaluate_freshness(LoadingContextForTest(instance), node))

    with DagsterInstance.ephemeral() as instance:
        assert state(timedelta()) is FreshnessState.UNKNOWN
        instance.report_runless_asset_event(AssetMaterialization(Topic("orders").key))
        assert state(timedelta(minutes=4)) is FreshnessState.PASS
        assert state(timedelta(minutes=6)) is FreshnessState.FAIL


def test_a_check_does_not_wait_for_a_locked_table_for_ever(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "COUNT_SECONDS", 1.0)
    with psycopg.connect(settings.dsn.get_secret_value()) as other:
        other.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(ServerRefused, match=r"^the rows of outbox could not be counted within 1 s: see whether"):
            checks.wait_until_drained(settings, 0.1)
    assert checks.wait_until_drained(settings, 0.1) == 0


def test_a_check_may_wait_for_longer_than_postgres_lets_a_statement_last(settings: Settings) -> None:
    assert checks.wait_until_drained(settings, LONGEST_SECONDS) == 0
    assert checks.wait_until_drained(settings, math.inf) == 0
