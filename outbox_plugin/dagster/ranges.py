"""A range of a topic as the configuration of a run, and the tags by which a consumer's runs are found."""

from __future__ import annotations

from typing import Any

from dagster import Config
from pydantic import Field

from outbox_plugin.core.ranges import TopicRange
from outbox_plugin.errors import RangeRefused

CONSUMER_TAG, TOPIC_TAG = "outbox/consumer", "outbox/topic"


class RangeConfig(Config):
    """The range of a topic that a run consumes: what `build_topic_sensor` requests, and a backfill names.

    Example:
        @asset
        def totals(config: RangeConfig, outbox: OutboxResource) -> MaterializeResult:
            return MaterializeResult(metadata=consume_range(outbox.settings(), config.range(), add).metadata)
    """

    consumer: str = Field(description="Whose position is moved.")
    topic: str = Field(description="The topic's name.")
    topic_id: str = Field(description="Kafka's id of the topic, by which one that is made anew is told.")
    begin: dict[str, int] = Field(description="Of each partition, the first offset.")
    end: dict[str, int] = Field(description="Of each partition, the offset after the last.")
    backfill: str = Field(
        default="",
        description="A name, to consume again what has been consumed: the backfill has a position of its own.",
    )

    def range(self) -> TopicRange:
        """The range.

        Raises:
            RangeRefused: partitions or offsets make no sense.
        """
        try:
            begin, end = ({int(each): offset for each, offset in given.items()} for given in (self.begin, self.end))
        except ValueError:
            raise RangeRefused(f"{self.consumer}: partitions are numbers (given: {', '.join(self.begin)})") from None
        return TopicRange(self.consumer, self.topic, self.topic_id, begin, end, self.backfill)


def as_config(wanted: TopicRange) -> dict[str, Any]:
    """The range as a run's configuration says it."""
    return {
        "consumer": wanted.consumer,
        "topic": wanted.topic,
        "topic_id": wanted.topic_id,
        "begin": {str(partition): offset for partition, offset in wanted.begin.items()},
        "end": {str(partition): offset for partition, offset in wanted.end.items()},
        "backfill": wanted.backfill,
    }
