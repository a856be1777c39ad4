"""Runs of Spark assets while a server is down, and backfills: what was to be emitted is, once."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from dagster import (
    AssetExecutionContext,
    DagsterInstance,
    Definitions,
    EnvVar,
    JobDefinition,
    MaterializeResult,
    ReexecutionOptions,
    StaticPartitionsDefinition,
    asset,
    define_asset_job,
    execute_job,
    in_process_executor,
    instance_for_test,
    reconstructable,
)
from psycopg import sql
from pyspark.sql import functions as f

from outbox_plugin import Harvester, Settings
from outbox_plugin.dagster import OutboxResource, job_id
from outbox_plugin.dagster.spark import SparkResource
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.embedded.stack import EmbeddedStack
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from tests.harvesting import consume, create_topic, drained

pytestmark = [pytest.mark.chaos, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]

TOPIC, ROWS = "departures", 200
MONTHS = ["2013-01", "2013-02"]


@asset(partitions_def=StaticPartitionsDefinition(MONTHS))
def flights(context: AssetExecutionContext, outbox: OutboxResource, spark: SparkResource) -> MaterializeResult[None]:
    """A month of flights and their events; fails once after the commit where the test says so."""
    settings = outbox.settings()
    month = context.partition_key
    rows = spark.session.range(ROWS).select(f.lit(month).alias("month"), f.col("id").alias("number"))
    events = rows.select(f.concat(f.lit("N"), f.col("number") % 7).alias("key"), f.struct("*").alias("value"))
    OutboxWrite(settings, job_id=job_id(context)).table(
        rows, "flight", mode="overwrite", where=sql.SQL("month = {}").format(month)
    ).events(events, topic=TOPIC).commit()
    marker = Path(os.environ["FAIL_ONCE"])
    if marker.exists():
        marker.unlink()
        raise RuntimeError("lost its way after the commit")
    return MaterializeResult()


def flights_job() -> JobDefinition:
    """The job as a worker process would load it."""
    outbox = OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))
    definitions = Definitions(
        assets=[flights],
        jobs=[define_asset_job("flights_job", [flights])],
        resources={"outbox": outbox, "spark": SparkResource()},
        executor=in_process_executor,
    )
    return definitions.resolve_job_def("flights_job")


@pytest.fixture(scope="module")
def own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStack]:
    """Servers of the module's own, which it may kill."""
    stack = EmbeddedStack(tmp_path_factory.mktemp("runs") / "stack")
    stack.start()
    yield stack
    stack.stop()


@pytest.fixture
def settings(own_servers: EmbeddedStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """An empty outbox, an empty table, and an environment that names them."""
    settings = Settings(dsn=own_servers.postgres.dsn, bootstrap_servers=own_servers.kafka.bootstrap_servers)
    monkeypatch.setenv("OUTBOX_DSN", settings.dsn.get_secret_value())
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", settings.bootstrap_servers)
    monkeypatch.setenv("FAIL_ONCE", str(tmp_path / "fail once"))
    migrate(settings)
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("DROP TABLE IF EXISTS flight")
        connection.execute("CREATE TABLE flight (month TEXT, number BIGINT, PRIMARY KEY (month, number))")
    return settings


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    with instance_for_test() as instance:
        yield instance


def run(instance: DagsterInstance, month: str, again: str | None = None) -> tuple[bool, str, str]:
    """A run of one partition, or the run `again` executed again: whether it succeeded, its id, and what failed."""
    with execute_job(
        reconstructable(flights_job),
        instance,
        tags={"dagster/partition": month},
        reexecution_options=ReexecutionOptions.from_failure(again, instance) if again else None,
    ) as done:
        failures = [event.step_failure_data.error for event in done.all_node_events if event.is_step_failure]
        return done.success, done.run_id, "".join(str(error.cause or error) for error in failures if error)


def arrived(settings: Settings, since: int) -> Counter[str]:
    """How often each event arrived, of those after the first `since` of the topic."""
    with Harvester(settings):
        drained(settings)
    return Counter(record.value or "" for record in consume(settings, TOPIC)[since:])


def present(settings: Settings) -> int:
    """How many records are on the topic already, which is made if it is not there."""
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute("TRUNCATE outbox")
    try:
        create_topic(settings, TOPIC, partitions=1)
    except Exception:  # It is there.
        return len(consume(settings, TOPIC))
    return 0


def test_a_backfill_emits_each_partitions_events_once(settings: Settings, instance: DagsterInstance) -> None:
    """One run a partition; the second fails after its commit, and is executed again from the failure."""
    before = present(settings)
    for month in MONTHS:
        if month == MONTHS[1]:
            Path(os.environ["FAIL_ONCE"]).touch()
            success, first, said = run(instance, month)
            assert (success, "lost its way" in said) == (False, True)
            assert run(instance, month, again=first)[0]
        else:
            assert run(instance, month)[0]
    seen = arrived(settings, before)
    assert (len(seen), set(seen.values())) == (len(MONTHS) * ROWS, {1})


def test_a_run_while_kafka_is_down_succeeds_and_its_events_leave_later(
    own_servers: EmbeddedStack, settings: Settings, instance: DagsterInstance
) -> None:
    before, kafka = present(settings), own_servers.kafka
    assert isinstance(kafka, EmbeddedKafka)
    kafka.kill()
    assert run(instance, MONTHS[0])[0]
    kafka.launch()
    kafka.wait()
    seen = arrived(settings, before)
    assert (len(seen), set(seen.values())) == (ROWS, {1})


def test_a_run_while_postgres_is_down_fails_and_its_retry_repeats_nothing(
    own_servers: EmbeddedStack, settings: Settings, instance: DagsterInstance
) -> None:
    before = present(settings)
    own_servers.postgres.kill()
    success, first, said = run(instance, MONTHS[0])
    assert not success
    assert "Postgres, as OUTBOX_DSN names it: connection failed" in said
    own_servers.postgres.launch()
    own_servers.postgres.wait()
    assert run(instance, MONTHS[0], again=first)[0]
    seen = arrived(settings, before)
    assert (len(seen), set(seen.values())) == (ROWS, {1})
