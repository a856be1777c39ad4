"""The sensor that has an asset consume a topic, range by range."""

import time
from datetime import UTC, datetime
from typing import NamedTuple

from dagster import (
    AssetKey,
    AssetObservation,
    AssetsDefinition,
    AssetSelection,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    MetadataValue,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from outbox_plugin.consuming.positions import read_position
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import Planned, Position, TopicRange, TopicState, plan
from outbox_plugin.core.utc import in_utc_if_naive
from outbox_plugin.dagster.health import Metadata, evaluation
from outbox_plugin.dagster.range_config import CONSUMER_TAG, TOPIC_TAG, as_config
from outbox_plugin.dagster.range_decisions import Bounds, Memory, RangeDecision, decide
from outbox_plugin.dagster.resources import OutboxResource
from outbox_plugin.dagster.topic import Emitter, as_topics, asset_key
from outbox_plugin.errors import InvalidSetting, ServerRefused, TopicReplaced
from outbox_plugin.printable import printable
from outbox_plugin.settings import Settings
from outbox_plugin.status.health_rules import HealthResult
from outbox_plugin.threads.deadline_future import DeadlineFuture

# A tick that waits holds up every other sensor, so a tick gives up soon on a server that is away.
ANSWER_SECONDS = 1.5
RETRY_SECONDS = 600.0  # How long a tick waits for the retry of a failed run that Dagster has announced.
CONSUMED_IN_FULL = "consumed_in_full"
WILL_RETRY_TAG, RETRIED_BY_TAG = "dagster/will_retry", "dagster/auto_retry_run_id"
STUCK_SECONDS = 3600.0
LAUNCH_SECONDS = 600.0  # How long a tick waits for a created run to be launched.
_UNFINISHED = [each for each in DagsterRunStatus if each.name not in ("NOT_STARTED", "SUCCESS", "FAILURE", "CANCELED")]


def build_topic_sensor(
    topic: str,
    asset: Emitter,
    *,
    resource_key: str = "outbox",
    name: str | None = None,
    interval_seconds: int = 30,
    max_records: int = 100_000,
    max_wait_seconds: float = 60.0,
    stuck_after_seconds: float = STUCK_SECONDS,
    default_status: DefaultSensorStatus = DefaultSensorStatus.RUNNING,
) -> SensorDefinition:
    """A sensor that has `asset` consume `topic`: it requests a run for each new range of offsets.

    The asset takes a `RangeConfig`, and consumes that range by `consume_range` or `consume_range_with_spark`. These
    move the position in the transaction of the effects. Each tick asks Postgres for the position, Kafka for the topic's
    end, and Dagster for unfinished runs. So one range of a consumer is in flight at a time, a range whose run failed is
    requested again, and after any pause the sensor goes on where the asset stands.

    It observes the asset on each tick (`lag_offsets`, `waiting_seconds`), and evaluates its check `consumed_in_full`.
    A tick ends within about 2 s, even if a server is away.

    Args:
        topic: its name.
        asset: the asset. Its key is the consumer's name: each asset has a position of its own.
        resource_key: the `OutboxResource` that names Postgres and Kafka.
        name: the sensor's; by default `<asset>_of_<topic>`.
        interval_seconds: the shortest time between two ticks.
        max_records: the most offsets in a range. Offsets count records, and markers of Kafka's transactions.
        max_wait_seconds: how long the first record of a smaller range waits before a run is requested.
        stuck_after_seconds: a run that takes longer fails the check. The sensor still waits for it, as it may commit.
        default_status: whether it runs from the start.

    Raises:
        InvalidSetting: the name is not one that Kafka allows, or a bound is too low.
    """
    as_topics([topic])
    if max_records < 1 or max_wait_seconds < 0:
        raise InvalidSetting(
            f"max_records must be at least 1, max_wait_seconds at least 0 (given: {max_records}, {max_wait_seconds})"
        )
    key, bounds = asset_key(asset), Bounds(max_records, max_wait_seconds)
    op = asset.node_def.name if isinstance(asset, AssetsDefinition) else key.to_python_identifier()
    consumer = key.to_user_string()

    @sensor(
        name=name or f"{key.to_python_identifier()}_of_{''.join(c if c.isalnum() else '_' for c in topic)}",
        minimum_interval_seconds=interval_seconds,
        default_status=default_status,
        required_resource_keys={resource_key},
        asset_selection=AssetSelection.assets(key),
        description=f"Has {consumer} consume the topic {topic}, range by range.",
    )
    def consume_topic(context: SensorEvaluationContext) -> SensorResult:
        resource: OutboxResource = getattr(context.resources, resource_key)
        now, memory = time.time(), Memory.parse(context.cursor)
        # Runs before the position: what one has committed that is finished now is seen in the position then.
        run = unfinished_run(context.instance, consumer, topic, now)
        try:
            position, state = _asked(resource.settings(), consumer, topic)
            planned = plan(consumer, topic, position, state, max_records)
        except _NotAnswered as error:
            context.log.warning(printable(str(error)))
            return SensorResult(skip_reason=str(error), cursor=context.cursor)
        except (ServerRefused, TopicReplaced) as error:
            context.log.warning(printable(str(error)))
            stopped = evaluation(unreadable(error), key, CONSUMED_IN_FULL)
            return SensorResult(skip_reason=str(error), asset_events=[stopped], cursor=context.cursor)
        decision = decide(memory, position, planned, run.explanation if run else None, bounds, now)
        judged = consumption_health(position, planned, run, stuck_after_seconds)
        if not judged.passed:
            context.log.warning(printable(judged.explanation))
        return SensorResult(
            run_requests=[_request(decision.range, op, key)] if decision.range else [],
            skip_reason=None if decision.range else printable(decision.why),
            asset_events=[
                AssetObservation(key, metadata=_shown(topic, decision, planned, position)),
                evaluation(judged, key, CONSUMED_IN_FULL),
            ],
            cursor=decision.memory.encode(),
        )

    return consume_topic


FREES_IT = (
    "see whether the run's process is there; where it is gone, terminate the run in Dagster, and its range is "
    "requested again; with run_monitoring in dagster.yaml, Dagster ends such runs by itself; where runs may take as "
    "long, raise stuck_after_seconds"
)
SAYS_WHERE = "run the job that sets the consumer's position, at the beginning or the end of the topic as it is now"

LETS_IT_READ = (
    "see that the topic is there under this name, and that the user of Kafka may read it; if it was deleted, then once "
    f"it is created again, {SAYS_WHERE}"
)


class _NotAnswered(Exception):
    """A server did not answer in time, Postgres refused, or the topic of a new consumer is not there yet."""


def _asked(settings: Settings, consumer: str, topic: str) -> tuple[Position | None, TopicState]:
    """The consumer's position and the topic's state, asked of both servers at once.

    Raises:
        _NotAnswered: a server did not answer in time, Postgres refused, or the topic of a new consumer cannot be read.
        ServerRefused: the topic that the consumer has read before is not there, or may not be read any more.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    in_kafka = DeadlineFuture(lambda: _state_or_refusal(settings, topic))
    in_postgres = DeadlineFuture(lambda: (read_position(settings, consumer, topic),))
    position, no_position = in_postgres.result(deadline, "Postgres")
    state, no_state = in_kafka.result(deadline, "Kafka")
    if position is None or state is None:
        raise _NotAnswered("; ".join(problem for problem in (no_position, no_state) if problem))
    if isinstance(state, ServerRefused):
        raise _NotAnswered(str(state)) if position[0] is None else state
    return position[0], state


def _state_or_refusal(settings: Settings, topic: str) -> TopicState | ServerRefused:
    """The topic's state, or Kafka's refusal of it, which is final: trying again does not help."""
    try:
        return topic_state(settings, topic, ANSWER_SECONDS)
    except ServerRefused as refusal:
        return refusal


def unreadable(error: ServerRefused | TopicReplaced) -> HealthResult:
    """The health of a consumer whose topic cannot be read as before."""
    return HealthResult(False, str(error), True, SAYS_WHERE if isinstance(error, TopicReplaced) else LETS_IT_READ)


class UnfinishedRun(NamedTuple):
    """A run of the consumer that may still commit: its description, and the seconds that it has run or been queued."""

    explanation: str
    seconds: float = 0.0


def unfinished_run(
    instance: DagsterInstance, consumer: str, topic: str, now: float, but: str | None = None
) -> UnfinishedRun | None:
    """The run of the consumer that may still commit; None if there is none.

    A run that is launched later than `LAUNCH_SECONDS` consumes what is left of its range.

    Args:
        instance: knows the runs.
        consumer: the consumer's name.
        topic: the topic's.
        now: in seconds since the epoch.
        but: the id of a run that does not count.
    """
    tags = {CONSUMER_TAG: consumer, TOPIC_TAG: topic}
    running = instance.get_run_records(RunsFilter(tags=tags, statuses=_UNFINISHED), limit=2)
    made = instance.get_run_records(
        RunsFilter(
            tags=tags,
            statuses=[DagsterRunStatus.NOT_STARTED],
            created_after=datetime.fromtimestamp(now - LAUNCH_SECONDS, UTC),
        ),
        limit=2,
    )
    for record in [*running, *made]:
        run, requested_at = record.dagster_run, _seconds(record.create_timestamp)
        if run.run_id == but:
            continue
        waited = max(0.0, now - requested_at)
        said = f"the run {run.run_id} is {run.status.value.lower()}, {waited:.0f} s after it was requested"
        return UnfinishedRun(said, max(0.0, now - (record.start_time or requested_at)))
    last = instance.get_run_records(RunsFilter(tags=tags), limit=1)
    if last and _will_be_retried(last[0].dagster_run) and now - (last[0].end_time or 0.0) < RETRY_SECONDS:
        return UnfinishedRun(f"the run {last[0].dagster_run.run_id} failed, and Dagster will retry it")
    return None


def _will_be_retried(run: DagsterRun) -> bool:
    promised = run.tags.get(WILL_RETRY_TAG) == "true" and RETRIED_BY_TAG not in run.tags
    return run.status is DagsterRunStatus.FAILURE and promised


def _seconds(moment: datetime) -> float:
    return in_utc_if_naive(moment).timestamp()


def _request(wanted: TopicRange, op: str, key: AssetKey) -> RunRequest:
    # No run key: Dagster would never request a range again whose run has failed.
    return RunRequest(
        asset_selection=[key],
        run_config={"ops": {op: {"config": as_config(wanted)}}},
        tags={CONSUMER_TAG: wanted.consumer, TOPIC_TAG: wanted.topic, "outbox/range": wanted.text()[:200]},
    )


def consumption_health(
    position: Position | None, planned: Planned, run: UnfinishedRun | None = None, stuck_after_seconds: float = 0.0
) -> HealthResult:
    """Whether no record was lost before it was consumed, and none waits for a run that does not end.

    Args:
        position: of the consumer; None where it has none yet.
        planned: the range that comes next.
        run: the unfinished run of a range, if there is one.
        stuck_after_seconds: a run that takes longer is reported.
    """
    lost = position.lost if position else 0
    wrong = []
    if planned.lost:
        wrong.append(f"Kafka has deleted {planned.lost} offsets before they were consumed: they are passed over")
    if lost:
        wrong.append(f"earlier ranges lost {lost} offsets in the same way")
    if planned.beyond:
        said = ", ".join(map(str, planned.beyond))
        wrong.append(f"partition {said} ends before the position: a broker has just taken over, or has lost records")
    if run and planned.range and run.seconds > stuck_after_seconds:
        said = f"{planned.lag} offsets wait: {run.explanation}, and the position does not move"
        return HealthResult(False, "; ".join([said, *wrong]), True, FREES_IT)
    if wrong:
        return HealthResult(
            False,
            "; ".join(wrong),
            True,
            "keep records longer (retention.ms), or consume more often; "
            "then acknowledge it by the job that sets the consumer's position, with `here`",
        )
    return HealthResult(True, f"{planned.lag} offsets wait, and none was lost")


def _shown(topic: str, decision: RangeDecision, planned: Planned, position: Position | None) -> Metadata:
    return {
        "topic": MetadataValue.text(topic),
        "lag_offsets": MetadataValue.int(planned.lag),
        "waiting_seconds": MetadataValue.float(round(decision.waited_seconds, 1)),
        "requests": MetadataValue.int(decision.memory.requests),
        "lost_offsets": MetadataValue.int((position.lost if position else 0) + planned.lost),
        "decision": MetadataValue.text(printable(decision.why)),
    }
