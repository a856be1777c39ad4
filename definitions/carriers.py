"""The asset `departures_per_carrier`: events consumed by whoever has room, with nothing that stops at a rebalance."""

import json
from collections import Counter
from collections.abc import Iterator

from confluent_kafka import Message
from dagster import AssetExecutionContext, AssetKey, MaterializeResult, asset

from definitions.departures import TOPIC
from outbox_plugin import coordination
from outbox_plugin.dagster import OutboxResource

HEARTBEAT_INTERVAL_SECONDS = 2.0
QUIET_SECONDS = 6.0  # More than two heartbeats: what a killed run held is ours by then.
MAX_EVENTS = 50_000  # Of one run, which keeps them until their count is stored.


@asset(deps=[AssetKey(["kafka", TOPIC])], kinds={"kafka"}, group_name="outbox")
def departures_per_carrier(context: AssetExecutionContext, outbox: OutboxResource) -> Iterator[MaterializeResult[None]]:
    """New departures by carrier, at least once.

    Each run goes on where the last one ended. Runs at the same time share the topic's partitions, and none of them
    stops when another comes or goes; a step that is retried goes on with what it held. What a run has counted is stored
    before the position moves: a run that ends in between is counted again by the next one.
    """
    settings = outbox.settings()
    carriers: Counter[str] = Counter()
    counted: list[Message] = []
    with coordination.Consumer(
        [TOPIC],
        group_id="departures-per-carrier",
        client_id=context.run.run_id,
        heartbeat_interval_seconds=HEARTBEAT_INTERVAL_SECONDS,
        bootstrap_servers=settings.bootstrap_servers,
        kafka=settings.kafka,
    ) as departures:
        while len(counted) < MAX_EVENTS and (departure := departures.poll(QUIET_SECONDS)) is not None:
            carriers[json.loads(departure.value() or b"{}").get("carrier", "unknown")] += 1
            counted.append(departure)
        yield MaterializeResult(metadata={"events": carriers.total(), "carriers": dict(carriers)})
        for departure in counted:  # Dagster has stored the result.
            departures.commit(departure)
