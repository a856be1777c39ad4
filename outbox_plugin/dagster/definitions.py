"""All definitions of an outbox in one call, for a project to merge into its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from dagster import AssetKey, Definitions

from outbox_plugin.dagster.assets import build_harvester_asset, build_topic_assets, defined_topics
from outbox_plugin.dagster.checks import build_dead_letter_check, build_health_check, build_outbox_checks
from outbox_plugin.dagster.daemon_supervision import check_lease
from outbox_plugin.dagster.jobs import build_outbox_jobs
from outbox_plugin.dagster.resources import HarvesterResource
from outbox_plugin.dagster.sensor import build_harvester_sensor
from outbox_plugin.dagster.topic import Topic
from outbox_plugin.dagster.translator import DagsterOutboxTranslator
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.status.health_rules import Limits


def build_outbox_definitions(
    harvester: HarvesterResource,
    topics: Sequence[Topic],
    *,
    prefix: str = "",
    interval_seconds: int = 10,
    spark_resource_key: str | None = None,
    drain_within: timedelta = timedelta(minutes=2),
    blocking: bool = False,
    limits: Limits | None = None,
    translator: DagsterOutboxTranslator | None = None,
) -> Definitions:
    """All of an outbox: its table, topics and harvester as assets, the sensor, checks, jobs and resources.

    The resources are `outbox` and `harvester`, so an asset that emits asks for `outbox: OutboxResource`.

    Args:
        harvester: the harvester, and the outbox that it relays.
        topics: the topics, and the assets that emit to them.
        prefix: comes before each name; set it for a second outbox in one Dagster deployment.
        interval_seconds: the time between two ticks of the sensor.
        spark_resource_key: names the `SparkResource` that reads large topics for the checks; None reads without Spark,
            at most 5,000,000 records.
        drain_within: how long the check `outbox_drained` waits for the events of an asset.
        blocking: whether assets downstream of an asset that emits wait for its check `outbox_drained`.
        limits: when the harvester's checks warn, and when they fail.
        translator: makes the specs of the assets: their keys, groups, owners, tags, kinds and metadata.

    Raises:
        InvalidSetting: the harvester's lease is shorter than two of the sensor's intervals, a topic is named twice, or
            its `outboxes` do not name this outbox.

    Example:
        `Definitions.merge(mine, build_outbox_definitions(HarvesterResource(outbox=…), [Topic("orders", [orders])]))`.
    """
    if harvester.mode == "supervise" and isinstance(harvester.lease_seconds, int | float):  # It may be an EnvVar.
        check_lease(harvester.lease_seconds, interval_seconds)
    names = [topic.name for topic in topics]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidSetting(
            f"topics: expected each topic once, with all assets that emit to it (given twice: {twice})"
        )
    assets = build_topic_assets(
        topics, outbox=AssetKey(f"{prefix}outbox"), table_name=harvester.outbox.table_name(), translator=translator
    )
    table = assets[0].key
    relay = build_harvester_asset(AssetKey(f"{prefix}harvester"), outbox=table, translator=translator)
    resource_key = f"{prefix}outbox"
    checks = [
        build_health_check(relay.key, resource_key=resource_key, limits=limits),
        build_dead_letter_check(relay.key, resource_key=resource_key, limits=limits),
    ]
    for emitter in sorted({emitter for topic in topics for emitter in topic.emitters}):
        checks += build_outbox_checks(
            emitter,
            topics=[topic.name for topic in topics if emitter in topic.emitters],
            resource_key=resource_key,
            spark_resource_key=spark_resource_key,
            drain_seconds=drain_within.total_seconds(),
            blocking=blocking,
            prefix=prefix,
        )
    sensor = build_harvester_sensor(
        relay.key,
        topics=defined_topics(topics, table),
        resource_key=f"{prefix}harvester",
        name=f"{prefix}harvester_sensor",
        interval_seconds=interval_seconds,
        limits=limits,
        translator=translator,
    )
    return Definitions(
        assets=[*assets, relay],
        asset_checks=checks,
        jobs=build_outbox_jobs(resource_key=resource_key, prefix=prefix),
        sensors=[sensor],
        resources={resource_key: harvester.outbox, f"{prefix}harvester": harvester},
    )
