"""A topic as Dagster's definitions declare it, and the keys of assets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from dagster import AssetKey, AssetsDefinition, AssetSpec

from outbox_plugin.emit.event import TOPIC_PATTERN
from outbox_plugin.errors import InvalidSetting

Emitter = AssetKey | AssetSpec | AssetsDefinition | str


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that events are published to.

    Attributes:
        name: the topic's name in Kafka.
        emitted_by: the assets that emit to the topic when they are materialized.
        fresh_within: the time without a new record after which Dagster calls the topic stale, at least a minute. None
            never does.
        outboxes: for a topic that several outboxes of a code location publish to: the keys of their tables' assets.
            Give the same list to each. The first outbox defines the topic's asset, downstream of all of them, and its
            sensor reports on the topic. Empty if there is one outbox.

    Raises:
        InvalidSetting: the name is not one that Kafka allows, or `emitted_by` or `outboxes` is one asset instead of a
            list of them.

    Example: `Topic("orders", emitted_by=[orders], fresh_within=timedelta(hours=1))`.
    """

    name: str
    emitted_by: Sequence[Emitter] = ()
    fresh_within: timedelta | None = None
    outboxes: Sequence[AssetKey | str] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(TOPIC_PATTERN, self.name) or self.name in (".", ".."):
            raise InvalidSetting(f"topic: expected 1 to 249 letters, digits, dots, _ and - (given: {self.name!r})")
        for field, assets in (("emitted_by", self.emitted_by), ("outboxes", self.outboxes)):
            # A text and a key are sequences, too.
            if isinstance(assets, Emitter) or not isinstance(assets, Sequence):
                raise InvalidSetting(f"the topic {self.name}: {field}: expected a list of assets (given: {assets!r})")

    @property
    def key(self) -> AssetKey:
        """The key of the topic's asset, `kafka/<name>`, unless a translator gives it another."""
        return AssetKey(["kafka", self.name])

    @property
    def emitters(self) -> tuple[AssetKey, ...]:
        """The keys of `emitted_by`."""
        return tuple(asset_key(emitter) for emitter in self.emitted_by)

    def tables(self, outbox: AssetKey) -> tuple[AssetKey, ...]:
        """The keys of the tables that the topic's events come from, of which `outbox` is one.

        Raises:
            InvalidSetting: `outboxes` does not name `outbox`.
        """
        tables = tuple(asset_key(table) for table in self.outboxes) or (outbox,)
        if outbox not in tables:
            raise InvalidSetting(
                f"the topic {self.name}: outboxes: expected {outbox.to_user_string()} among them "
                f"(given: {', '.join(table.to_user_string() for table in tables)})"
            )
        return tables


def as_topics(topics: Sequence[Topic | str]) -> list[Topic]:
    """The topics, each of which is given as it was declared, or by its name.

    Raises:
        InvalidSetting: `topics` is no list, or a name is not one that Kafka allows.
    """
    if isinstance(topics, str):
        raise InvalidSetting(f"topics: expected a list of topics' names (given: {topics!r})")
    return [topic if isinstance(topic, Topic) else Topic(topic) for topic in topics]


def asset_key(asset: Emitter) -> AssetKey:
    """The key of an asset, however it was given."""
    if isinstance(asset, str):
        return AssetKey.from_user_string(asset)
    return asset if isinstance(asset, AssetKey) else asset.key
