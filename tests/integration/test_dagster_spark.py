"""Spark in Dagster: an asset that returns a DataFrame emits one event per row, in processes of their own too."""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster import (
    AssetKey,
    AssetSelection,
    DagsterInstance,
    Definitions,
    EnvVar,
    JobDefinition,
    RetryPolicy,
    asset,
    define_asset_job,
    execute_job,
    materialize,
    multiprocess_executor,
    reconstructable,
)
from pyspark import SparkContext
from pyspark.sql import DataFrame

from outbox_plugin import Settings
from outbox_plugin.dagster import OutboxResource, build_outbox_checks
from outbox_plugin.dagster.spark import OutboxIOManager, SparkResource
from outbox_plugin.schema.migrate import migrate
from tests.harvesting import drained, harvesters
from tests.spark_support import PACKAGES, count, outbox_rows

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.timeout(900)]

ROWS = 100


def _events(spark: SparkResource, kind: str, rows: int = ROWS) -> DataFrame:
    return spark.session.range(0, rows, 1, 2).selectExpr(
        f"concat('{kind}-', id % 10) AS key",
        "struct(id) AS value",
        "id",
        f"map('idempotency-key', '{kind}-' || id) AS headers",
    )


@asset(io_manager_key="outbox_io", metadata={"outbox": {"topic": "orders", "orderBy": "id"}})
def orders(spark: SparkResource) -> DataFrame:
    return _events(spark, "order")


@asset(io_manager_key="outbox_io", metadata={"outbox": {"topic": "payments", "orderBy": "id"}})
def payments(spark: SparkResource) -> DataFrame:
    return _events(spark, "payment")


def both_in_processes() -> JobDefinition:
    """Its resources come from the environment, which each step's process inherits."""
    named = OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers="127.0.0.1:1")
    return Definitions(
        assets=[orders, payments],
        resources={"spark": SparkResource(), "outbox_io": OutboxIOManager(outbox=named)},
        executor=multiprocess_executor,
        jobs=[define_asset_job("both")],
    ).resolve_job_def("both")


@pytest.mark.slow
def test_steps_in_processes_of_their_own_have_a_session_each(
    dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Side by side, in one working directory."""
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    monkeypatch.setenv("OUTBOX_DSN", dsn)
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        result = execute_job(reconstructable(both_in_processes), instance=instance)
        assert result.success
        [told] = [
            event.materialization.metadata
            for event in result.all_node_events
            if event.is_step_materialization and event.asset_key == AssetKey("orders")
        ]
    assert (told["events"].value, told["dagster/row_count"].value) == (ROWS, ROWS)
    assert told["outbox_job"].value == f"{result.run_id}?asset=orders&output=orders/result"
    assert count(settings, "outbox") == 2 * ROWS
    of_orders = [value for key, value, *_ in outbox_rows(settings) if key.startswith("order")]
    assert of_orders == [f'{{"id":{n}}}' for n in range(ROWS)]


@pytest.mark.slow
def test_a_step_that_is_run_again_in_its_run_emits_nothing_again(dsn: str) -> None:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    outbox = OutboxResource(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    resources = {"spark": SparkResource(), "outbox_io": OutboxIOManager(outbox=outbox)}
    job = Definitions(assets=[orders], resources=resources).resolve_implicit_global_asset_job_def()
    for _ in range(2):
        assert job.execute_in_process(run_id="b6b3a1f0-0000-4000-8000-000000000000").success
    assert count(settings, "outbox") == ROWS


@pytest.mark.slow
def test_a_step_whose_jvm_dies_is_tried_again_with_a_new_session(dsn: str) -> None:
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    attempts = []

    @asset(
        io_manager_key="outbox_io", metadata={"outbox": {"topic": "orders"}}, retry_policy=RetryPolicy(max_retries=1)
    )
    def dying(spark: SparkResource) -> DataFrame:
        attempts.append(_events(spark, "order"))
        if len(attempts) == 1:
            gateway = SparkContext._gateway
            assert gateway is not None
            gateway.proc.kill()
            gateway.proc.wait()
        return attempts[-1]

    outbox = OutboxResource(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    resources = {"spark": SparkResource(), "outbox_io": OutboxIOManager(outbox=outbox)}
    assert materialize([dying], resources=resources).success
    assert (len(attempts), count(settings, "outbox")) == (2, ROWS)


def test_an_asset_that_returns_something_else_is_told_so(dsn: str) -> None:
    @asset(io_manager_key="outbox_io", metadata={"outbox": {"topic": "orders"}})
    def wrong() -> int:
        return 5

    outbox = OutboxResource(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    with pytest.raises(Exception, match="the outbox takes a Spark DataFrame; the asset returned int"):
        materialize([wrong], resources={"outbox_io": OutboxIOManager(outbox=outbox)})


@pytest.mark.slow
def test_the_order_check_reads_many_records_through_spark(
    settings: Settings, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_plugin.dagster.checks.SPARK_RECORDS", 50)
    monkeypatch.setenv("OUTBOX_SPARK_PACKAGES", PACKAGES)
    outbox = OutboxResource(
        dsn=settings.dsn.get_secret_value(), bootstrap_servers=settings.bootstrap_servers, group=settings.group
    )

    @asset(io_manager_key="outbox_io", metadata={"outbox": {"topic": topic, "orderBy": "id"}})
    def emitting(spark: SparkResource) -> DataFrame:
        return _events(spark, "order")

    resources = {"spark": SparkResource(), "outbox": outbox, "outbox_io": OutboxIOManager(outbox=outbox)}
    with DagsterInstance.ephemeral() as instance:
        assert materialize([emitting], resources=resources, instance=instance).success
        with harvesters(settings, tmp_path):
            drained(settings, 120)
        _, check = build_outbox_checks(AssetKey("emitting"), topics=[topic], spark_resource_key="spark")
        judging = define_asset_job("judging", AssetSelection.checks(check))
        definitions = Definitions(assets=[emitting], asset_checks=[check], resources=resources, jobs=[judging])
        result = definitions.resolve_job_def("judging").execute_in_process(instance=instance)
    evaluations = result.get_asset_check_evaluations()
    assert [evaluation.passed for evaluation in evaluations] == [True] * len(evaluations)
    assert {evaluation.metadata["records"].value for evaluation in evaluations} == {ROWS}
    assert {evaluation.metadata["missing"].value for evaluation in evaluations} == {0}
