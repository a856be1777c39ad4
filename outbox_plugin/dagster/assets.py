"""The outbox in the lineage graph: an emitting asset -> the outbox -> a topic, with the harvester beside them.

The outbox, the topics and the harvester are external assets: the harvester's sensor reports on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from dagster import AssetKey, AssetsDefinition, AssetSpec, FreshnessPolicy

from outbox_plugin.emit.event import TOPIC_PATTERN
from outbox_plugin.errors import InvalidSetting

GROUP = "outbox"
Emitter = AssetKey | AssetSpec | AssetsDefinition | str


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that events are published to.

    Attributes:
        name: the topic's name in Kafka.
        emitted_by: the assets that emit to the topic when they are materialized.
        fresh_within: the time without a new record after which Dagster calls the topic stale, at least a minute. None
            never does.

    Raises:
        InvalidSetting: the name is not one that Kafka allows, or `emitted_by` is one asset instead of a list of them.

    Example: `Topic("orders", emitted_by=[orders], fresh_within=timedelta(hours=1))`.
    """

    name: str
    emitted_by: Sequence[Emitter] = ()
    fresh_within: timedelta | None = None

    def __post_init__(self) -> None:
        check_topic_names([self.name])
        # A text and a key are sequences, too.
        if isinstance(self.emitted_by, Emitter) or not isinstance(self.emitted_by, Sequence):
            raise InvalidSetting(
                f"the topic {self.name}: emitted_by: expected a list of assets (given: {self.emitted_by!r})"
            )

    @property
    def key(self) -> AssetKey:
        """The key of the topic's asset."""
        return topic_key(self.name)

    @property
    def emitters(self) -> tuple[AssetKey, ...]:
        """The keys of `emitted_by`."""
        return tuple(emitter_key(emitter) for emitter in self.emitted_by)


def check_topic_names(topics: Sequence[str]) -> None:
    """Check that `topics` is a list of names that Kafka allows.

    Raises:
        InvalidSetting: it is not.
    """
    if isinstance(topics, str):
        raise InvalidSetting(f"topics: expected a list of topics' names (given: {topics!r})")
    for topic in topics:
        if not re.fullmatch(TOPIC_PATTERN, topic) or topic in (".", ".."):
            raise InvalidSetting(f"topic: expected 1 to 249 letters, digits, dots, _ and - (given: {topic!r})")


def topic_key(name: str) -> AssetKey:
    """The key of the asset of the topic `name`: `kafka/<name>`."""
    return AssetKey(["kafka", name])


def emitter_key(emitter: Emitter) -> AssetKey:
    """The key of an asset, however it was given."""
    if isinstance(emitter, str):
        return AssetKey.from_user_string(emitter)
    return emitter if isinstance(emitter, AssetKey) else emitter.key


def build_harvester_asset(key: AssetKey | str = "harvester", *, outbox: AssetKey | str | None = None) -> AssetSpec:
    """The harvester as an asset, whose page plots backlog, lag, rate, takeovers, suppressed duplicates, CPU and memory.

    Args:
        key: the asset's key.
        outbox: the asset of the table that the harvester relays, if there is one.
    """
    return AssetSpec(
        emitter_key(key),
        deps=[] if outbox is None else [emitter_key(outbox)],
        description="Relays the outbox to Kafka. Each tick of its sensor adds to the plots.",
        group_name=GROUP,
        kinds={"kafka"},
    )


def build_topic_assets(topics: Sequence[Topic], *, outbox: AssetKey | str = "outbox") -> list[AssetSpec]:
    """The outbox's table, downstream of all assets that emit, and each topic, downstream of the table.

    The harvester's sensor materializes a topic when it has new records, so Dagster's freshness policies work.
    """
    table = emitter_key(outbox)
    emitters = sorted({emitter for topic in topics for emitter in topic.emitters})
    return [
        AssetSpec(
            table,
            deps=emitters,
            description="Events wait here. They are written in the transaction of the rows that they are about.",
            group_name=GROUP,
            kinds={"postgres"},
        ),
        *(_topic_asset(topic, table) for topic in topics),
    ]


def _topic_asset(topic: Topic, table: AssetKey) -> AssetSpec:
    from_whom = ", ".join(emitter.to_user_string() for emitter in topic.emitters)
    return AssetSpec(
        topic.key,
        deps=[table],
        description=f"The topic {topic.name}" + (f", with the events of {from_whom}." if from_whom else "."),
        group_name=GROUP,
        kinds={"kafka"},
        metadata={"topic": topic.name},
        freshness_policy=FreshnessPolicy.time_window(topic.fresh_within) if topic.fresh_within else None,
    )
