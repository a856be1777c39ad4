"""The asset `carrier_delays`: the events of the flights, consumed by Spark into a table of delays per carrier."""

from typing import NamedTuple

import psycopg
from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    AssetKey,
    MaterializeResult,
    MetadataValue,
    asset,
    asset_check,
)
from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from definitions.departures import TOPIC
from outbox_plugin.consuming.spark import consume_range_with_spark
from outbox_plugin.dagster import OutboxResource, RangeConfig
from outbox_plugin.dagster.spark import SparkResource
from outbox_plugin.spark import OutboxWrite

DELAY_TABLE = """
CREATE TABLE IF NOT EXISTS carrier_delay (
    job           TEXT   NOT NULL,
    carrier       TEXT   NOT NULL,
    flights       BIGINT NOT NULL,
    delay_minutes BIGINT NOT NULL,
    PRIMARY KEY (job, carrier)
)
"""
ADD_TO_IT = sql.SQL(
    "(job, carrier) DO UPDATE SET flights = carrier_delay.flights + excluded.flights,"
    " delay_minutes = carrier_delay.delay_minutes + excluded.delay_minutes"
)
# Of a job that emitted: by carrier, what the source has, and what was consumed, where they differ.
DIFFERENCES = """
WITH source AS (
    SELECT carrier, count(*) AS flights, sum(delay_minutes) AS delay_minutes
    FROM flight WHERE departed_at IS NOT NULL AND tail_number IS NOT NULL GROUP BY carrier
), delay AS (
    SELECT carrier, flights, delay_minutes FROM carrier_delay WHERE job = %s
)
SELECT carrier, coalesce(source.flights, 0), coalesce(source.delay_minutes, 0),
       coalesce(delay.flights, 0), coalesce(delay.delay_minutes, 0)
FROM source FULL JOIN delay USING (carrier)
WHERE (source.flights, source.delay_minutes) IS DISTINCT FROM (delay.flights, delay.delay_minutes)
ORDER BY 1
"""
# The job that emitted last, how many events, how many of them have been consumed, and how many flights there are.
LAST = """
SELECT job_id, events, (SELECT coalesce(sum(flights), 0)::bigint FROM carrier_delay WHERE job = job_id),
       (SELECT count(*) FROM flight WHERE departed_at IS NOT NULL AND tail_number IS NOT NULL)
FROM outbox_job WHERE events > 0 ORDER BY committed_at DESC LIMIT 1
"""


@asset(deps=[AssetKey(["kafka", TOPIC])], kinds={"spark", "postgres"}, group_name="outbox")
def carrier_delays(config: RangeConfig, outbox: OutboxResource, spark: SparkResource) -> MaterializeResult[None]:
    """Departures and minutes of delay, per carrier and emitting job: each event counts once, whatever is run again."""
    settings = outbox.settings()
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(DELAY_TABLE)

    def add(records: DataFrame) -> OutboxWrite:
        return OutboxWrite(settings).table(delays_per_carrier(records), "carrier_delay", on_conflict=ADD_TO_IT)

    return MaterializeResult(metadata=consume_range_with_spark(spark.session, settings, config.range(), add).metadata)


def delays_per_carrier(records: DataFrame) -> DataFrame:
    """Flights and minutes of delay by emitting job and carrier, of records as Spark's Kafka source gives them."""
    job = f.filter("headers", lambda header: header["key"] == "outbox-job")
    value = f.from_json(f.col("value").cast("string"), "carrier string, delay_minutes long")
    events = records.select(
        f.coalesce(f.try_element_at(job, f.lit(1))["value"].cast("string"), f.lit("")).alias("job"),
        f.coalesce(value["carrier"], f.lit("")).alias("carrier"),
        f.coalesce(value["delay_minutes"], f.lit(0)).alias("delay_minutes"),
    )
    return events.groupBy("job", "carrier").agg(
        f.count("*").alias("flights"), f.sum("delay_minutes").alias("delay_minutes")
    )


@asset_check(asset=carrier_delays)
def delays_agree_with_flights(outbox: OutboxResource) -> AssetCheckResult:
    """The delays that came by way of Kafka are those of the flights in Postgres, carrier by carrier.

    A range may end amid a job's events: then the check warns, and passes after the range that has the last of them.
    """
    found = compare_with_flights(outbox.settings().dsn.get_secret_value())
    return AssetCheckResult(
        passed=found.agrees,
        severity=AssetCheckSeverity.ERROR if found.is_complete else AssetCheckSeverity.WARN,
        description=found.explanation,
        metadata={"job": MetadataValue.text(found.job), "compared": MetadataValue.bool(found.is_complete)},
    )


class Comparison(NamedTuple):
    """What the delays of a job are, beside the flights: whether they agree, as far as all of them can be compared."""

    job: str
    agrees: bool
    is_complete: bool
    explanation: str


def compare_with_flights(dsn: str) -> Comparison:
    """Compare the delays of the job that emitted last with the flights."""
    with psycopg.connect(dsn) as connection:
        last = connection.execute(LAST).fetchone()
        if last is None:
            return Comparison("", True, True, "nothing has been emitted yet")
        job, emitted, consumed, flights = last
        if emitted != flights:
            said = f"the last job emitted {emitted} of {flights} flights: they are not compared"
            return Comparison(job, True, False, said)
        found = connection.execute(DIFFERENCES, (job,)).fetchall()
    if consumed < emitted:
        return Comparison(job, False, False, f"{consumed} of {emitted} events are consumed so far")
    wrong = "; ".join(
        f"{carrier}: {flights} flights with {minutes} minutes of delay, and {came} with {late} came"
        for carrier, flights, minutes, came, late in found
    )
    return Comparison(job, not wrong, True, wrong or f"{consumed} flights and their delays agree, carrier by carrier")
