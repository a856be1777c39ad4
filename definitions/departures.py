"""The asset `departures`: flights into the business table, and an event for each that departed."""

import tempfile
import time
from pathlib import Path

from dagster import AssetExecutionContext, Config, MaterializeResult, asset
from psycopg import sql
from pydantic import Field
from pyspark.sql import functions as f

from definitions.flights import create_flight_table, departure_events, read_flights
from outbox_plugin.dagster import OutboxResource
from outbox_plugin.dagster.spark import SparkResource
from outbox_plugin.spark import OutboxWrite

TOPIC = "departures"
OF_MONTH = sql.SQL("extract(month FROM scheduled_at AT TIME ZONE 'America/New_York') = {}")


class DeparturesConfig(Config):
    """What to materialize."""

    month: int | None = Field(default=None, ge=1, le=12, description="Only this month of 2013; all of them by default.")


@asset(kinds={"spark", "postgres"}, group_name="outbox", deps=["nycflights13"])
def departures(
    context: AssetExecutionContext,
    config: DeparturesConfig,
    outbox: OutboxResource,
    spark: SparkResource,
) -> MaterializeResult[None]:
    """Flights of 2013 out of New York, each departure emitted as an event of its aircraft.

    Rows and events appear in one transaction. A materialization replaces the rows, or those of the month that is
    selected, and emits its events as a job of its own, named by the run: a step that is retried after its commit writes
    nothing again.
    """
    settings = outbox.settings()
    create_flight_table(settings.dsn.get_secret_value())
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        flights = read_flights(spark.session, Path(folder))
        if config.month is not None:
            flights = flights.where(f.month(f.from_utc_timestamp("scheduled_at", "America/New_York")) == config.month)
        flights = flights.cache()
        rows, cancelled, departed_without_tail_number, without_tail_number, aircraft = flights.agg(
            f.count("*"),
            f.count_if(f.col("departed_at").isNull()),
            f.count_if(f.col("departed_at").isNotNull() & f.col("tail_number").isNull()),
            f.count_if(f.col("tail_number").isNull()),
            f.count_distinct("tail_number"),
        ).first() or (0, 0, 0, 0, 0)
        context.log.info("flights are read; writing them and their events")
        written = (
            OutboxWrite(settings, job_id=context.run.run_id)
            .table(flights, "flight", mode="overwrite", where=OF_MONTH.format(config.month) if config.month else None)
            .events(
                departure_events(flights, context.run.run_id),
                topic=TOPIC,
                order_by=["departed_at", "carrier", "number"],
            )
            .commit()
        )
    seconds = time.monotonic() - began
    events = rows - cancelled - departed_without_tail_number  # Also when an earlier attempt of this run wrote them.
    context.log.info(f"{written.rows} rows and {written.events} events are committed after {seconds:.1f} s")
    return MaterializeResult(
        metadata={
            "dagster/table_name": "flight",
            "flights": rows,
            "events": events,
            "cancelled_without_event": cancelled,
            "without_tail_number": without_tail_number,
            "departed_without_tail_number": departed_without_tail_number,
            "aircraft": aircraft,
            "seconds": seconds,
            "events_per_second": events / seconds,
            "written_by_an_earlier_attempt": written.again,
        }
    )
