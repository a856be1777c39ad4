"""The check that a topic is consumed in full, and the job that sets a consumer's position."""

import time
from collections.abc import Callable
from typing import Literal

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    Config,
    Failure,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    asset_check,
    job,
    op,
)
from pydantic import Field

from outbox_plugin.consuming.positions import read_position, set_position
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import plan
from outbox_plugin.dagster.health import result
from outbox_plugin.dagster.resources import OutboxResource
from outbox_plugin.dagster.topic import Emitter, asset_key
from outbox_plugin.dagster.topic_sensor import (
    CONSUMED_IN_FULL,
    STUCK_SECONDS,
    consumption_health,
    unfinished_run,
    unreadable,
)
from outbox_plugin.errors import LogUnavailable, OutboxError, ServerRefused, TopicReplaced
from outbox_plugin.status.health_rules import unanswered


class PositionConfig(Config):
    """The position at which a consumer goes on."""

    where: Literal["beginning", "end", "here"] = Field(
        description="Of the topic as it is now; or here: the position stays, and its losses are acknowledged."
    )


def build_topic_check(
    topic: str, asset: Emitter, *, resource_key: str = "outbox", stuck_after_seconds: float = STUCK_SECONDS
) -> AssetChecksDefinition:
    """The check `consumed_in_full` of `asset`: Kafka deleted no record of `topic` before it was consumed.

    The check also fails while records wait for a run that has not ended after `stuck_after_seconds`, such as a run
    whose process was killed. The sensor of `build_topic_sensor` evaluates it on each tick, and Dagster can run it.

    Args:
        topic: its name.
        asset: consumes the topic.
        resource_key: names the `OutboxResource`.
        stuck_after_seconds: how long a run may take.
    """
    key = asset_key(asset)

    @asset_check(
        asset=key,
        name=CONSUMED_IN_FULL,
        required_resource_keys={resource_key},
        description=f"Kafka deleted nothing of the topic {topic} before it was consumed.",
    )
    def consumed_in_full(context: AssetCheckExecutionContext) -> AssetCheckResult:
        resource: OutboxResource = getattr(context.resources, resource_key)
        settings, consumer = resource.settings(), key.to_user_string()
        try:
            position = read_position(settings, consumer, topic)
        except OutboxError as error:
            return result(unanswered(error), {})
        try:
            planned = plan(consumer, topic, position, topic_state(settings, topic), 1)
        except (ServerRefused, TopicReplaced) as error:
            return result(unreadable(error), {})
        except LogUnavailable as error:
            return result(unanswered(error), {})
        run = unfinished_run(context.instance, consumer, topic, time.time(), but=context.run.run_id)
        judged = consumption_health(position, planned, run, stuck_after_seconds)
        return result(judged, {"lag_offsets": MetadataValue.int(planned.lag)})

    return consumed_in_full


def build_position_job(topic: str, asset: Emitter, *, resource_key: str = "outbox") -> JobDefinition:
    """The job `<asset>_position`, which sets the position of `asset` in `topic`, such as after the topic was recreated.

    Args:
        topic: its name.
        asset: consumes the topic.
        resource_key: names the `OutboxResource`.
    """
    key = asset_key(asset)
    name = f"{key.to_python_identifier()}_position"

    @op(name=f"set_{name}", required_resource_keys={resource_key})
    def set_it(context: OpExecutionContext, config: PositionConfig) -> None:
        resource: OutboxResource = getattr(context.resources, resource_key)
        try:
            done = set_position(resource.settings(), key.to_user_string(), topic, config.where)
        except OutboxError as error:
            raise Failure(str(error), allow_retries=False) from None
        context.log.info(done)
        context.add_output_metadata({"done": MetadataValue.text(done)})

    step: Callable[[], None] = set_it

    @job(
        name=name,
        description=f"Sets where {key.to_user_string()} goes on in the topic {topic}.",
        config={"ops": {set_it.name: {"config": {"where": "here"}}}},
    )
    def position_job() -> None:
        step()

    return position_job
