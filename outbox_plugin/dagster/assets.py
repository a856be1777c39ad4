"""The outbox in the lineage graph: an emitting asset -> the outbox -> a topic, with the harvester beside them.

The outbox, the topics and the harvester are external assets: the harvester's sensor reports on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagster import AssetKey, AssetSpec

from outbox_plugin.dagster.topic import Topic, asset_key
from outbox_plugin.dagster.translator import DagsterOutboxTranslator, OutboxAssetProps, topic_props


def build_harvester_asset(
    key: AssetKey | str = "harvester",
    *,
    outbox: AssetKey | str | None = None,
    translator: DagsterOutboxTranslator | None = None,
) -> AssetSpec:
    """The harvester as an asset, whose page plots backlog, lag, rate, takeovers, recovered rows, CPU and memory.

    Args:
        key: the asset's key, unless the translator gives it another.
        outbox: the key of the asset of the table that the harvester relays, if there is one. It is not translated.
        translator: makes the spec.
    """
    default = asset_key(key)
    deps = () if outbox is None else (asset_key(outbox),)
    props = OutboxAssetProps("harvester", default.to_user_string(), default, deps)
    return (translator or DagsterOutboxTranslator()).get_asset_spec(props)


def build_topic_assets(
    topics: Sequence[Topic],
    *,
    outbox: AssetKey | str = "outbox",
    table_name: str | None = None,
    translator: DagsterOutboxTranslator | None = None,
) -> list[AssetSpec]:
    """The outbox's table, downstream of all assets that emit, and each topic, downstream of the table.

    The harvester's sensor materializes a topic when it has new records, so Dagster's freshness policies work. A topic
    whose `outboxes` begin with another outbox is left out: the other one defines it.

    Args:
        topics: the topics, and the assets that emit to them.
        outbox: the key of the table's asset, unless the translator gives it another.
        table_name: the table's name in Postgres, for its metadata `dagster/table_name`.
        translator: makes the specs.

    Raises:
        InvalidSetting: a topic's `outboxes` do not name this outbox.
    """
    translate = (translator or DagsterOutboxTranslator()).get_asset_spec
    default = asset_key(outbox)
    emitters = tuple(sorted({emitter for topic in topics for emitter in topic.emitters}))
    table = translate(OutboxAssetProps("outbox", default.to_user_string(), default, emitters, table_name=table_name))
    return [
        table,
        *(translate(topic_props(topic, topic.tables(table.key))) for topic in defined_topics(topics, table.key)),
    ]


def defined_topics(topics: Sequence[Topic], outbox: AssetKey) -> list[Topic]:
    """The topics whose assets the outbox with the table's asset `outbox` defines, and on which its sensor reports.

    Raises:
        InvalidSetting: a topic's `outboxes` do not name this outbox.
    """
    return [topic for topic in topics if topic.tables(outbox)[0] == outbox]
