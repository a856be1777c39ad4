"""The translator: decides the key, group, owners, tags, kinds and metadata of each asset that an outbox defines.

It is what `DagsterDbtTranslator` is to dbt's models: a project subclasses it, and passes it to the functions that build
definitions. A component's attribute `translation` does the same in YAML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dagster import AssetKey, AssetSpec, FreshnessPolicy

from outbox_plugin.dagster.topic import Topic

GROUP = "outbox"


@dataclass(frozen=True, slots=True)
class OutboxAssetProps:
    """An asset that an outbox defines, before it is translated.

    Attributes:
        type: the outbox's table, a topic, or the harvester.
        name: the topic's name; for the others, their key as text.
        key: the asset's key by default.
        deps: the assets upstream of it.
        topic: the topic; None for the others.
        table_name: the table's name in Postgres; None for the others, or where it is not known yet.
    """

    type: Literal["outbox", "topic", "harvester"]
    name: str
    key: AssetKey
    deps: tuple[AssetKey, ...] = ()
    topic: Topic | None = None
    table_name: str | None = None


class DagsterOutboxTranslator:
    """Makes the `AssetSpec` of each asset that an outbox defines: its table, its topics and its harvester.

    Override `get_asset_spec` to change keys, groups, owners, tags, kinds or metadata. Checks, sensors and lineage
    follow the keys. Assets that emit or consume are your own, and are not translated.

    Example:
        class Ours(DagsterOutboxTranslator):
            def get_asset_spec(self, props: OutboxAssetProps) -> AssetSpec:
                spec = super().get_asset_spec(props)
                return spec.replace_attributes(key=spec.key.with_prefix("shop"), owners=["team:orders"])
    """

    def get_asset_spec(self, props: OutboxAssetProps) -> AssetSpec:
        """The asset's spec. It is called more than once for an asset, and must give it the same key each time."""
        topic = props.topic
        return AssetSpec(
            props.key,
            deps=props.deps,
            description=_description(props),
            group_name=GROUP,
            kinds={"postgres" if props.type == "outbox" else "kafka"},
            metadata=_metadata(props),
            freshness_policy=FreshnessPolicy.time_window(topic.fresh_within) if topic and topic.fresh_within else None,
        )


def _metadata(props: OutboxAssetProps) -> dict[str, str]:
    if props.topic is not None:
        return {"topic": props.topic.name}
    return {"dagster/table_name": props.table_name} if props.table_name else {}


def _description(props: OutboxAssetProps) -> str:
    if props.topic is not None:
        from_whom = ", ".join(emitter.to_user_string() for emitter in props.topic.emitters)
        return f"The topic {props.topic.name}" + (f", with the events of {from_whom}." if from_whom else ".")
    if props.type == "outbox":
        return "Events wait here. They are written in the transaction of the rows that they are about."
    return "Relays the outbox to Kafka. Each tick of its sensor adds to the plots."


def topic_props(topic: Topic, tables: tuple[AssetKey, ...] = ()) -> OutboxAssetProps:
    """The properties of a topic's asset, downstream of `tables`."""
    return OutboxAssetProps("topic", topic.name, topic.key, tables, topic)
