"""What names a job in Dagster: retries of a job emit nothing again, and no job silences another."""

from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
import pytest
from dagster import (
    AssetExecutionContext,
    AssetOut,
    AssetsDefinition,
    BackfillPolicy,
    DagsterInstance,
    Definitions,
    DynamicOut,
    DynamicOutput,
    EnvVar,
    ExecuteInProcessResult,
    JobDefinition,
    Out,
    Output,
    ReexecutionOptions,
    StaticPartitionsDefinition,
    asset,
    define_asset_job,
    execute_job,
    in_process_executor,
    job,
    materialize,
    multi_asset,
    op,
    reconstructable,
)
from pyspark.sql import DataFrame, SparkSession

from outbox_plugin import Settings
from outbox_plugin.dagster import OutboxResource, job_id
from outbox_plugin.dagster.spark import OutboxIOManager
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from tests.spark_support import count, outbox_rows

pytestmark = [
    pytest.mark.integration,
    pytest.mark.spark,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
]

ROWS = 5
REGIONS = StaticPartitionsDefinition(["eu", "us", "asia"])
FAILS: list[str] = []
TO_T: Mapping[str, Any] = {"outbox": {"topic": "t"}}


@pytest.fixture
def settings(dsn: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("OUTBOX_DSN", dsn)
    settings = Settings(dsn=dsn, bootstrap_servers="127.0.0.1:1")
    migrate(settings)
    return settings


def resources() -> dict[str, object]:
    return {"outbox_io": OutboxIOManager(outbox=OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers="none:1"))}


def events(kind: str) -> DataFrame:
    spark = SparkSession.getActiveSession()
    assert spark
    return spark.range(0, ROWS, 1, 1).selectExpr(f"'{kind}' AS key", "cast(id AS string) AS value")


def keys(settings: Settings) -> list[str]:
    return sorted({key for key, *_ in outbox_rows(settings)})


@multi_asset(
    outs={"orders": AssetOut(io_manager_key="outbox_io", metadata=TO_T), "audit": AssetOut(io_manager_key="nowhere")}
)
def orders_and_audit() -> Iterator[Output[Any]]:
    yield Output(events("orders"), "orders")
    if FAILS:
        raise RuntimeError(FAILS.pop())
    yield Output(None, "audit")


def emitting_job() -> JobDefinition:
    from dagster import mem_io_manager

    return Definitions(
        assets=[orders_and_audit],
        resources={**resources(), "nowhere": mem_io_manager},
        executor=in_process_executor,
        jobs=[define_asset_job("emitting")],
    ).resolve_job_def("emitting")


def run(instance: DagsterInstance, again: str | None = None) -> tuple[bool, str]:
    options = ReexecutionOptions.from_failure(again, instance) if again else None
    with execute_job(reconstructable(emitting_job), instance, reexecution_options=options) as done:
        return done.success, done.run_id


@pytest.mark.slow
def test_a_run_that_is_executed_again_emits_nothing_again(settings: Settings) -> None:
    """Its first output is emitted, then its step fails."""
    FAILS.append("after the first output")
    with DagsterInstance.ephemeral() as instance:
        success, first = run(instance)
        assert (success, count(settings, "outbox")) == (False, ROWS)
        assert run(instance, again=first)[0]
        assert count(settings, "outbox") == ROWS
        assert run(instance)[0]  # Another run is another job.
        assert count(settings, "outbox") == 2 * ROWS


def test_what_the_version_before_has_emitted_is_not_emitted_again(settings: Settings) -> None:
    """The upgrade comes between a run that fails and the one that executes it again."""
    FAILS.append("after the first output")
    with DagsterInstance.ephemeral() as instance:
        _, first = run(instance)
        with psycopg.connect(settings.dsn.get_secret_value()) as connection:
            connection.execute("DELETE FROM outbox_job")
            written = "INSERT INTO outbox_job (job_id, events) VALUES (%s, %s)"
            connection.execute(written, (f"{first}/orders", ROWS))
        assert run(instance, again=first)[0]
    assert count(settings, "outbox") == ROWS


def partitioned(name: str, *path: str) -> AssetsDefinition:
    @asset(
        name=name,
        key_prefix=path,
        partitions_def=REGIONS,
        backfill_policy=BackfillPolicy.single_run(),
        io_manager_key="outbox_io",
        metadata=TO_T,
    )
    def emitting() -> DataFrame:
        return events(f"{'/'.join([*path, name])} by region")

    return emitting


def row_counts(done: ExecuteInProcessResult, asset: str) -> list[dict[str, object]]:
    """What the materializations of an asset say of rows, by Dagster's names."""
    found = done.asset_materializations_for_node(asset.replace("/", "__"))
    return [
        {name: value.value for name, value in each.metadata.items() if name.endswith("row_count")} for each in found
    ]


def test_assets_whose_names_read_alike_each_emit(settings: Settings) -> None:
    """The partition `eu` of the asset `orders`, and the asset `orders/eu`."""

    @asset(name="eu", key_prefix=["orders"], io_manager_key="outbox_io", metadata=TO_T)
    def in_parts() -> DataFrame:
        return events("orders, eu")

    done = materialize([partitioned("orders"), in_parts], resources=resources(), partition_key="eu")
    assert done.success
    assert row_counts(done, "orders") == [{"dagster/partition_row_count": ROWS}]
    assert row_counts(done, "orders/eu") == [{"dagster/row_count": ROWS}]
    assert keys(settings) == ["orders by region", "orders, eu"]


def test_a_backfill_in_a_single_run_emits(settings: Settings) -> None:
    of = {"dagster/asset_partition_range_start": "eu", "dagster/asset_partition_range_end": "asia"}
    done = materialize([partitioned("orders")], resources=resources(), tags=of)
    assert done.success
    assert count(settings, "outbox") == ROWS
    assert {str(counted) for counted in row_counts(done, "orders")} == {
        "{}"
    }  # How many each partition has is not known.


def test_an_asset_that_writes_and_returns_events_emits_both(settings: Settings) -> None:
    @asset(io_manager_key="outbox_io", metadata=TO_T)
    def orders(context: AssetExecutionContext) -> DataFrame:
        assert not OutboxWrite(settings, job_id(context)).events(events("written"), topic="t").commit().again
        return events("returned")

    assert materialize([orders], resources=resources()).success
    assert keys(settings) == ["returned", "written"]


def test_what_ops_put_out_is_emitted(settings: Settings) -> None:
    """One output, several of one op, and one for each key of a dynamic one."""

    @op(out=Out(io_manager_key="outbox_io", metadata=TO_T))
    def one() -> DataFrame:
        return events("one")

    @op(out={"a": Out(io_manager_key="outbox_io", metadata=TO_T), "b": Out(io_manager_key="outbox_io", metadata=TO_T)})
    def two() -> Iterator[Output[DataFrame]]:
        yield Output(events("a"), "a")
        yield Output(events("b"), "b")

    @op(out=DynamicOut(io_manager_key="outbox_io", metadata=TO_T))
    def many() -> Iterator[DynamicOutput[DataFrame]]:
        for key in ("x", "y"):
            yield DynamicOutput(events(key), mapping_key=key)

    @job(resource_defs=resources(), executor_def=in_process_executor)
    def emitting() -> None:
        one()
        one.alias("another")()
        two()
        many()

    assert emitting.execute_in_process().success
    assert (keys(settings), count(settings, "outbox")) == (["a", "b", "one", "x", "y"], 6 * ROWS)


def test_columns_to_order_by_may_be_a_list(settings: Settings) -> None:
    def ordered(by: object) -> AssetsDefinition:
        @asset(io_manager_key="outbox_io", metadata={"outbox": {"topic": "t", "orderBy": by}})
        def orders() -> DataFrame:
            return events("k").selectExpr("key", "value", "value % 2 AS odd", "-value AS last")

        return orders

    assert materialize([ordered(["odd", "last"])], resources=resources()).success
    assert [value for _, value, *_ in outbox_rows(settings)] == ["4", "2", "0", "3", "1"]
    with pytest.raises(Exception, match="the metadata `outbox`: orderBy: expected text, or for orderBy a list"):
        materialize([ordered(5)], resources=resources())


def test_a_job_of_one_outbox_silences_no_other(settings: Settings) -> None:
    """Two outboxes of one schema, and two jobs called `nightly`."""
    other = Settings(dsn=settings.dsn.get_secret_value(), bootstrap_servers="none:1", table="outbox_b")
    migrate(other)
    for outbox in (settings, other):
        write = OutboxWrite(outbox, job_id="nightly").events(events("k"), topic="t")
        assert [write.commit().again, write.commit().again] == [False, True]
    frame = events("sink").write.format("outbox").options(topic="t", jobId="by the sink").mode("append")
    for table in ("outbox", "public.outbox", "outbox_b", "outbox_b"):
        frame.options(dsn=settings.dsn.get_secret_value(), table=table).save()
    assert (count(settings, "outbox"), count(settings, "outbox_b")) == (2 * ROWS, 2 * ROWS)


def test_a_job_of_the_version_before_is_done_for_every_outbox(settings: Settings) -> None:
    """It did not say of which outbox it was."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("INSERT INTO outbox_job (job_id, events) VALUES ('nightly', 5)")
    assert OutboxWrite(settings, job_id="nightly").events(events("k"), topic="t").commit().again
