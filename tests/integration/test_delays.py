"""The reference location's round trip: what its check says of the delays that came by way of Kafka."""

from __future__ import annotations

import psycopg
import pytest
from pyspark.sql import SparkSession

from definitions.delays import DELAY_TABLE, compare_with_flights, delays_per_carrier
from definitions.flights import create_flight_table
from outbox_plugin import Settings

pytestmark = pytest.mark.integration

FLIGHT = """
INSERT INTO flight SELECT now() + make_interval(mins => number), %s, number, 'JFK', 'BOS', 'N1', now(), 5, 187
FROM generate_series(1, %s) AS each (number)
"""


def test_the_check_compares_each_carrier_with_its_flights(settings: Settings) -> None:
    dsn = settings.dsn.get_secret_value()
    create_flight_table(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:

        def consumed(carrier: str, flights: int, minutes: int) -> None:
            connection.execute(
                "INSERT INTO carrier_delay VALUES ('run 1', %s, %s, %s) ON CONFLICT (job, carrier) DO UPDATE SET"
                " flights = excluded.flights, delay_minutes = excluded.delay_minutes",
                (carrier, flights, minutes),
            )

        connection.execute(DELAY_TABLE)
        assert compare_with_flights(dsn) == ("", True, True, "nothing has been emitted yet")
        connection.execute(FLIGHT, ("AA", 3))
        connection.execute(FLIGHT, ("UA", 2))
        connection.execute("INSERT INTO outbox_job (job_id, events) VALUES ('run 1', 5)")
        consumed("AA", 3, 15)
        assert compare_with_flights(dsn) == ("run 1", False, False, "3 of 5 events are consumed so far")
        consumed("UA", 2, 10)
        agreed = "5 flights and their delays agree, carrier by carrier"
        assert compare_with_flights(dsn) == ("run 1", True, True, agreed)
        consumed("UA", 2, 11)
        said = "UA: 2 flights with 10 minutes of delay, and 2 with 11 came"
        assert compare_with_flights(dsn) == ("run 1", False, True, said)
        consumed("UA", 3, 10)
        said = "UA: 2 flights with 10 minutes of delay, and 3 with 10 came"
        assert compare_with_flights(dsn) == ("run 1", False, True, said)
        connection.execute("INSERT INTO outbox_job (job_id, events) VALUES ('run 2', 1)")
        said = "the last job emitted 1 of 5 flights: they are not compared"
        assert compare_with_flights(dsn) == ("run 2", True, False, said)


def test_delays_are_summed_by_job_and_carrier_also_of_records_that_are_none_of_ours(spark: SparkSession) -> None:
    ours = [("outbox-job", b"run 1"), ("event-type", b"FlightDeparted")]
    records = [
        (b'{"carrier": "AA", "delay_minutes": 5}', ours),
        (b'{"carrier": "AA", "delay_minutes": -2}', ours),
        (b'{"carrier": "UA", "delay_minutes": 7}', ours),
        (b"no JSON", None),
    ]
    schema = "value binary, headers array<struct<key: string, value: binary>>"
    found = delays_per_carrier(spark.createDataFrame(records, schema)).collect()
    assert sorted(map(tuple, found)) == [("", "", 1, 0), ("run 1", "AA", 2, 3), ("run 1", "UA", 1, 7)]
