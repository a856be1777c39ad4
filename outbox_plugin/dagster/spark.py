"""Spark in Dagster: a session per step, and an I/O manager that emits what an asset returns."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from dagster import (
    ConfigurableIOManager,
    ConfigurableResource,
    DagsterInvariantViolationError,
    InitResourceContext,
    InputContext,
    OutputContext,
)
from pydantic import Field, PrivateAttr
from pyspark.sql import DataFrame, SparkSession

from outbox_plugin.core.job_id import former_job_ids
from outbox_plugin.dagster.job_ids import output_job_id
from outbox_plugin.dagster.resources import OutboxResource
from outbox_plugin.embedded.java import spark_java_home
from outbox_plugin.schema.connection import connect, errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.spark.session import jvm_is_dead, spark_session


class SparkResource(ConfigurableResource["SparkResource"]):
    """A Spark session for one step, started on first use and ended with the step.

    Each process of the multi-process executor has its own driver, JVM and scratch folder. The in-process executor ends
    a step's session before the next step starts one.

    Example:
        @asset(io_manager_key="outbox_io")
        def orders(spark: SparkResource) -> DataFrame:
            return spark.session.read.parquet("orders").selectExpr("customer AS key", "struct(*) AS value")
    """

    master: str = Field(default="local[2]", description="Spark's master URL.")
    conf: dict[str, str] = Field(default_factory=dict, description="Spark's configuration properties.")
    _opened: ExitStack = PrivateAttr(default_factory=ExitStack)
    _session: SparkSession | None = PrivateAttr(default=None)

    @property
    def session(self) -> SparkSession:
        """The step's session; it knows the format "outbox". A retry in the same process gets a new one if its JVM died.

        Raises:
            ServerFailed: there is no Java.
        """
        if self._session is not None and jvm_is_dead():
            self._end()
        if self._session is None:
            java = str(spark_java_home()) if self.master.startswith("local") else None
            self._session = self._opened.enter_context(spark_session(self.master, conf=self.conf, java_home=java))
        return self._session

    def teardown_after_execution(self, context: InitResourceContext) -> None:  # noqa: ARG002
        """End the session, after the step's outputs are stored."""
        self._end()

    def _end(self) -> None:
        self._session = None
        self._opened.close()


class OutboxIOManager(ConfigurableIOManager):
    """Emits one event per row of the DataFrame that an asset, or an op, returns: one job for each output.

    The first run, the asset, the partitions and the output name the job. So a step that is retried after its commit, or
    a run that is executed again, emits nothing again. The columns are those of `df.write.format("outbox")`. Its options
    are taken from the output's metadata `outbox`; `orderBy` may be a list of columns.

    Example:
        @asset(io_manager_key="outbox_io", metadata={"outbox": {"topic": "orders", "orderBy": "placed_at"}})
    """

    outbox: OutboxResource = Field(description="The outbox that events are written to.")

    def handle_output(self, context: OutputContext, obj: object) -> None:
        """Emit the events.

        Raises:
            DagsterInvariantViolationError: the asset returned no DataFrame, or an option in its metadata is no text.
            pyspark.errors.PySparkException: the write failed; nothing was written. If Postgres was lost during the
                commit, the message says that the outcome is unknown. A retry of the step is safe in either case.
        """
        if not isinstance(obj, DataFrame):
            kind = type(obj).__name__
            raise DagsterInvariantViolationError(f"the outbox takes a Spark DataFrame; the asset returned {kind}")
        settings = self.outbox.settings()
        name = output_job_id(context)
        options = _options(context.definition_metadata.get("outbox") or {})
        mine = {"dsn": settings.dsn.get_secret_value(), "table": settings.table, "jobId": name}
        obj.write.format("outbox").options(**options, **mine).mode("append").save()
        with errors_as_refusals(settings), connect(settings, purpose="outbox dagster") as connection:
            jobs = {"jobs": [name, *former_job_ids(name)]}
            outbox = with_schema(connection, settings.table)
            emitted = connection.execute(statement("staging", "emitted", outbox), jobs).fetchall()
        events = emitted[0][1] if emitted else 0
        context.add_output_metadata({"events": events, **_row_count(context, events), "outbox_job": name})

    def load_input(self, context: InputContext) -> None:  # noqa: ARG002
        """An outbox is only written to.

        Raises:
            DagsterInvariantViolationError: always.
        """
        raise DagsterInvariantViolationError("events cannot be read back from the outbox: declare the asset as a dep")


def _row_count(context: OutputContext, rows: int) -> dict[str, int]:
    """The count by Dagster's name for it. Of several partitions at once, the count of each is not known."""
    if not context.has_asset_partitions:
        return {"dagster/row_count": rows}
    return {"dagster/partition_row_count": rows} if len(context.asset_partition_keys) == 1 else {}


def _options(given: Mapping[str, object]) -> dict[str, str]:
    """The sink's options, from metadata.

    Raises:
        DagsterInvariantViolationError: one is neither text nor, for `orderBy`, a list of columns.
    """
    options = {}
    for name, value in given.items():
        if isinstance(value, list | tuple) and name.lower() == "orderby":
            value = ",".join(str(column) for column in value)
        if not isinstance(value, str):
            raise DagsterInvariantViolationError(
                f"the metadata `outbox`: {name}: expected text, or for orderBy a list of columns (given: {value!r})"
            )
        options[name] = value
    return options
