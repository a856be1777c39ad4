"""The reference code location: a Spark asset that emits, the harvester that relays, checks that prove it."""

from dagster import AssetKey, AssetSpec, Definitions

from definitions.carriers import departures_per_carrier
from definitions.departures import TOPIC, departures
from outbox_plugin.dagster import build_outbox_checks
from sensors import HARVESTER, RESOURCES, harvester_sensor

DEPARTURES = AssetKey("departures")

definitions = Definitions(
    assets=[
        departures,
        AssetSpec(HARVESTER, description="Relays the outbox to Kafka.", group_name="outbox", kinds={"kafka"}),
        AssetSpec(
            AssetKey(["kafka", TOPIC]),
            deps=[DEPARTURES],
            description="The topic that the events arrive on.",
            group_name="outbox",
            kinds={"kafka"},
        ),
        departures_per_carrier,
    ],
    asset_checks=build_outbox_checks(DEPARTURES, topics=[TOPIC], harvester=HARVESTER),
    sensors=[harvester_sensor],
    resources=RESOURCES,
)
