"""Asset checks that prove that an outbox drained, and that its events arrived once and in order."""

import time
from collections.abc import Sequence
from contextlib import closing

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetKey,
    asset_check,
)

from outbox_plugin.core.verdict import SEQUENCE_HEADER, Verdict
from outbox_plugin.dagster.health import metadata, troubles
from outbox_plugin.dagster.resources import OutboxResource
from outbox_plugin.dagster.sensor import HEALTHY
from outbox_plugin.errors import ServerRefused
from outbox_plugin.event import IDEMPOTENCY_HEADER
from outbox_plugin.schema.connection import connect, reported_as_refusal
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings
from outbox_plugin.status import read_status
from outbox_plugin.verification import records_in, verify_topic

POLL_SECONDS = 0.2
SPARK_RECORDS = 5_000  # Below that, a session takes longer to start than one consumer to read.


def build_outbox_checks(
    asset: AssetKey,
    *,
    topics: Sequence[str],
    harvester: AssetKey | None = None,
    resource_key: str = "outbox",
    spark_resource_key: str | None = None,
    drain_seconds: float = 120.0,
) -> list[AssetChecksDefinition]:
    """Checks on `asset`, which emits to `topics` through the outbox of the resource `resource_key`.

    `outbox_drained`: what was in the outbox when the check began has left it within `drain_seconds`.
    `events_in_order`: once they have left, on every topic each event is seen once, and each key's events in the order
    of their emission. What records lack the headers for (`idempotency-key`, and `outbox-sequence`, which a Spark job's
    have) is not judged, and the explanation says of how many. With `spark_resource_key`, which names a `SparkResource`,
    Spark reads topics of more than a few thousand records, and also says how many events are missing.
    With `harvester`, also that asset's check `healthy`, as the harvester's sensor reports it.
    """

    @asset_check(
        asset=asset,
        name="outbox_drained",
        required_resource_keys={resource_key},
        description="All events that were waiting when the check began have left for Kafka.",
    )
    def outbox_drained(context: AssetCheckExecutionContext) -> AssetCheckResult:
        settings = _settings(context, resource_key)
        began = time.monotonic()
        left = wait_until_drained(settings, drain_seconds)
        seconds = time.monotonic() - began
        status = read_status(settings)
        explanation = (
            f"all events left within {seconds:.1f} s"
            if not left
            else f"{left} events still wait after {seconds:.0f} s: {troubles(status) or 'the harvester is too slow'}; "
            "see the harvester's asset and its log"
        )
        return AssetCheckResult(
            passed=not left,
            metadata={"explanation": explanation, "waiting": left, "seconds": seconds, **metadata(status)},
        )

    @asset_check(
        asset=asset,
        name="events_in_order",
        required_resource_keys={resource_key, *([spark_resource_key] if spark_resource_key else [])},
        description="Each event is on its topic once, and each key's events are in the order of their emission.",
    )
    def events_in_order(context: AssetCheckExecutionContext) -> AssetCheckResult:
        settings = _settings(context, resource_key)
        left = wait_until_drained(settings, drain_seconds)  # Checks run in any order, or side by side.
        try:
            verdicts = _judged(context, settings, topics, spark_resource_key)
        except ServerRefused as error:
            return AssetCheckResult(
                passed=False, metadata={"explanation": f"{error}; is it the one that is emitted to?"}
            )
        wrong = "; ".join(_explained(topic, verdict) for topic, verdict in verdicts.items() if not verdict.in_order)
        records = sum(verdict.records for verdict in verdicts.values())
        return AssetCheckResult(
            passed=not wrong,
            metadata={
                "explanation": wrong
                or "; ".join([f"{records} records, each once, each key's in order", *_not_judged(verdicts, left)]),
                "records": records,
                "duplicates": sum(verdict.duplicates for verdict in verdicts.values()),
                "order_violations": sum(verdict.order_violations for verdict in verdicts.values()),
                "missing": sum(verdict.missing for verdict in verdicts.values()),
            },
        )

    checks = [outbox_drained, events_in_order]
    if harvester is not None:
        checks.append(_healthy(harvester, resource_key))
    return checks


def _healthy(harvester: AssetKey, resource_key: str) -> AssetChecksDefinition:
    @asset_check(
        asset=harvester,
        name=HEALTHY,
        required_resource_keys={resource_key},
        description="Every shard has a leader that is heard, and no harvester complains.",
    )
    def healthy(context: AssetCheckExecutionContext) -> AssetCheckResult:
        status = read_status(_settings(context, resource_key))
        trouble = troubles(status)
        explanation = trouble or "a leader is heard, and it has no trouble"
        return AssetCheckResult(passed=not trouble, metadata={"explanation": explanation, **metadata(status)})

    return healthy


def wait_until_drained(settings: Settings, seconds: float) -> int:
    """Wait until all rows that are there now have left; returns how many have not within `seconds`.

    Raises:
        ServerRefused, SchemaMissing: Postgres does not let us look.
    """
    deadline = time.monotonic() + seconds
    with reported_as_refusal(settings), closing(connect(settings, purpose="outbox check")) as connection:

        def count(last: int | None) -> tuple[int, int | None]:
            row = connection.execute(statement("window", "waiting", settings.table), {"last": last}).fetchone()
            return (row[0], row[1]) if row else (0, None)

        waiting, last = count(None)
        while waiting and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            waiting, _ = count(last)
    return waiting


def _judged(
    context: AssetCheckExecutionContext, settings: Settings, topics: Sequence[str], spark: str | None
) -> dict[str, Verdict]:
    """What each topic proves; where Spark reads them, what all of them do."""
    if spark is None or records_in(settings, topics) <= SPARK_RECORDS:
        return {topic: verify_topic(settings, topic) for topic in topics}
    from outbox_plugin.spark.verify import verify

    return {", ".join(topics): verify(getattr(context.resources, spark).session, settings, topics)}


def _settings(context: AssetCheckExecutionContext, resource_key: str) -> Settings:
    resource: OutboxResource = getattr(context.resources, resource_key)
    return resource.settings()


def _not_judged(verdicts: dict[str, Verdict], left: int) -> list[str]:
    """What a check that passed has not proved."""
    unnamed = sum(verdict.unnamed for verdict in verdicts.values())
    unplaced = sum(verdict.unplaced for verdict in verdicts.values())
    missing = [each for verdict in verdicts.values() for each in verdict.example_missing]
    lost = sum(verdict.missing for verdict in verdicts.values())
    return [
        *([f"{left} events have not left the outbox yet, and are not judged"] if left else []),
        *([f"{unnamed} carry no {IDEMPOTENCY_HEADER}: whether they came twice is not judged"] if unnamed else []),
        *([f"{lost} are not there (such as {', '.join(missing)}): expired, or lost"] if lost else []),
        *([f"{unplaced} carry no {SEQUENCE_HEADER}: their order is not judged"] if unplaced else []),
    ]


def _explained(topic: str, verdict: Verdict) -> str:
    said = []
    if verdict.duplicates:
        said.append(f"{verdict.duplicates} events came twice (such as {', '.join(verdict.example_duplicates)})")
    if verdict.order_violations:
        said.append(f"{verdict.order_violations} came out of order (such as {', '.join(verdict.example_violations)})")
    return f"topic {topic}: {' and '.join(said)}; does anything but the harvester write to it?"
