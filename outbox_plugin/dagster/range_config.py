"""A range of a topic as a run's configuration, and the tags of a consumer's runs."""

from __future__ import annotations

from typing import Any

from dagster import Config
from pydantic import Field

from outbox_plugin.core.topic_ranges import TopicRange
from outbox_plugin.errors import RangeRefused

CONSUMER_TAG, TOPIC_TAG = "outbox/consumer", "outbox/topic"


class RangeConfig(Config):
    """The range of a topic that a run consumes. `build_topic_sensor` requests ranges; for a backfill, you name one.

    Example:
        @asset
        def totals(config: RangeConfig, outbox: OutboxResource) -> MaterializeResult:
            return MaterializeResult(metadata=consume_range(outbox.settings(), config.range(), add).metadata)
    """

    consumer: str = Field(description="The consumer whose position is moved.")
    topic: str = Field(description="The topic's name.")
    topic_id: str = Field(
        description="Kafka's id of the topic, which changes when the topic is deleted and created again."
    )
    begin: dict[str, int] = Field(description="The first offset of each partition.")
    end: dict[str, int] = Field(description="The offset after the last one, of each partition.")
    backfill: str = Field(
        default="",
        description="The name of a backfill, which consumes records again: it has a position of its own.",
    )

    def range(self) -> TopicRange:
        """The range.

        Raises:
            RangeRefused: a partition or an offset is not possible.
        """
        try:
            begin, end = ({int(each): offset for each, offset in given.items()} for given in (self.begin, self.end))
        except ValueError:
            given = ", ".join({**self.begin, **self.end})
            raise RangeRefused(f"{self.consumer}: partitions are numbers (given: {given})") from None
        return TopicRange(self.consumer, self.topic, self.topic_id, begin, end, self.backfill)


def as_config(topic_range: TopicRange) -> dict[str, Any]:
    """The range as a run's configuration."""
    return {
        "consumer": topic_range.consumer,
        "topic": topic_range.topic,
        "topic_id": topic_range.topic_id,
        "begin": {str(partition): offset for partition, offset in topic_range.begin.items()},
        "end": {str(partition): offset for partition, offset in topic_range.end.items()},
        "backfill": topic_range.backfill,
    }
