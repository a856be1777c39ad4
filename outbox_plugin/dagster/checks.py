"""Asset checks: the outbox has drained, and its events are on Kafka once and in order."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import psycopg
from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSpec,
    AssetKey,
    MetadataValue,
    asset_check,
    multi_asset_check,
)

from outbox_plugin.core.delivery_options import Delivery
from outbox_plugin.core.headers import IDEMPOTENCY_HEADER, REPLAY_HEADER, SEQUENCE_HEADER
from outbox_plugin.dagster.health import Metadata, metadata, result
from outbox_plugin.dagster.resources import OutboxResource
from outbox_plugin.dagster.sensor import HEALTHY, NO_DEAD_LETTERS
from outbox_plugin.dagster.topic import as_topics
from outbox_plugin.errors import OutboxError, ServerRefused, UserError
from outbox_plugin.schema.connection import connect, errors_as_refusals
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.table_name import with_schema
from outbox_plugin.settings import Settings
from outbox_plugin.status.health_rules import HealthResult, Limits, dead_letters, health, unanswered, undrained
from outbox_plugin.status.reader import Status, read_status
from outbox_plugin.verification.topic_reader import MAX_RECORDS, records_in, verify_topic
from outbox_plugin.verification.verdict import TopicVerdict

POLL_SECONDS = 0.2
COUNT_SECONDS = 30.0  # How long a count of the waiting rows may take beyond the time to drain.
LONGEST_STATEMENT_SECONDS = 2_000_000.0  # Postgres takes no time limit of more than 2**31 milliseconds.
SPARK_RECORDS = 5_000  # One consumer reads fewer records before a Spark session has started.
DRAINED, IN_ORDER, EXACTLY_ONCE = "outbox_drained", "events_in_order", "events_exactly_once"


def build_outbox_checks(
    asset: AssetKey,
    *,
    topics: Sequence[str],
    harvester: AssetKey | None = None,
    resource_key: str = "outbox",
    spark_resource_key: str | None = None,
    drain_seconds: float = 120.0,
    blocking: bool = False,
    limits: Limits | None = None,
    prefix: str = "",
) -> list[AssetChecksDefinition]:
    """Checks on `asset`, which emits to `topics`.

    `outbox_drained` passes when the rows that wait at its start have left the outbox within `drain_seconds`.
    `events_in_order` and `events_exactly_once` wait for the same, and then read the topics: each key's events are in
    the order of their emission, and each event is there once. A replay repeats events on purpose, so records with the
    header `outbox-replay` are only counted. Order is judged by the header `outbox-sequence`, which
    Spark's jobs write, and duplicates by that or `idempotency-key`. The explanation counts the records without these
    headers.

    Args:
        asset: emits the events.
        topics: all topics that the asset emits to.
        harvester: adds the checks `healthy` and `no_dead_letters` of this asset, which its sensor evaluates.
        resource_key: names the `OutboxResource` of the outbox.
        spark_resource_key: names a `SparkResource` that reads topics of more than a few thousand records. The
            explanation then also counts missing events. None reads without Spark, at most 5,000,000 records.
        drain_seconds: how long the checks wait for the outbox to drain.
        blocking: whether assets downstream of `asset` wait for `outbox_drained` in the same run, and are skipped if it
            fails.
        limits: decide how severe a failure of the harvester's checks is.
        prefix: comes before the name of each check on `asset`; set it for a second outbox that the asset emits to.

    Raises:
        InvalidSetting: `topics` is no list, or a name is not one that Kafka allows.
    """
    names = [topic.name for topic in as_topics(topics)]
    checks = [
        _drained(asset, f"{prefix}{DRAINED}", resource_key, drain_seconds, blocking),
        _events(asset, prefix, names, resource_key, spark_resource_key, drain_seconds),
    ]
    if harvester is not None:
        checks += [
            build_health_check(harvester, resource_key=resource_key, limits=limits),
            build_dead_letter_check(harvester, resource_key=resource_key, limits=limits),
        ]
    return checks


def build_health_check(
    harvester: AssetKey, *, resource_key: str = "outbox", limits: Limits | None = None
) -> AssetChecksDefinition:
    """The check `healthy` of the asset `harvester`. The sensor evaluates it on each tick, and Dagster can run it.

    Args:
        harvester: the key of the harvester's asset.
        resource_key: the key of the `OutboxResource`.
        limits: when a failure warns, and when it is an error; by default, those of `Limits()`.
    """
    description = "Every shard has a leader, no harvester reports trouble, and no event waits too long."
    return _of_status(harvester, HEALTHY, description, health, resource_key, limits)


def build_dead_letter_check(
    harvester: AssetKey, *, resource_key: str = "outbox", limits: Limits | None = None
) -> AssetChecksDefinition:
    """The check `no_dead_letters` of the asset `harvester`. The sensor evaluates it, and Dagster can run it.

    Args:
        harvester: the key of the harvester's asset.
        resource_key: the key of the `OutboxResource`.
        limits: when a failure warns, and when it is an error; by default, those of `Limits()`.
    """
    description = "Kafka has refused no row: no row is a dead letter, and no key is parked."
    return _of_status(harvester, NO_DEAD_LETTERS, description, dead_letters, resource_key, limits)


def _of_status(
    harvester: AssetKey,
    name: str,
    description: str,
    judge: Callable[[Status, Limits], HealthResult],
    resource_key: str,
    limits: Limits | None,
) -> AssetChecksDefinition:
    """A check that reads the status when it runs."""

    @asset_check(asset=harvester, name=name, required_resource_keys={resource_key}, description=description)
    def judged(context: AssetCheckExecutionContext) -> AssetCheckResult:
        status = read_status(_settings(context, resource_key))
        return result(judge(status, limits or Limits()), metadata(status))

    return judged


def _drained(
    asset: AssetKey, name: str, resource_key: str, drain_seconds: float, blocking: bool
) -> AssetChecksDefinition:
    @asset_check(
        asset=asset,
        name=name,
        blocking=blocking,
        required_resource_keys={resource_key},
        description="All events that waited when the check started have been published.",
    )
    def outbox_drained(context: AssetCheckExecutionContext) -> AssetCheckResult:
        settings = _settings(context, resource_key)
        began = time.monotonic()
        try:
            left = wait_until_drained(settings, drain_seconds)
        except OutboxError as error:
            return result(unanswered(error), metadata(read_status(settings)))
        seconds = time.monotonic() - began
        status = read_status(settings)
        judged = (
            undrained(left, seconds, status) if left else HealthResult(True, f"all events left within {seconds:.1f} s")
        )
        waited = {"waiting": MetadataValue.int(left), "seconds": MetadataValue.float(round(seconds, 1))}
        return result(judged, {**waited, **metadata(status)})

    return outbox_drained


def _events(
    asset: AssetKey, prefix: str, topics: Sequence[str], resource_key: str, spark: str | None, drain_seconds: float
) -> AssetChecksDefinition:
    """Both checks at once, because one read of the topics serves both."""
    in_order, exactly_once = f"{prefix}{IN_ORDER}", f"{prefix}{EXACTLY_ONCE}"

    @multi_asset_check(
        # No name that an asset is likely to have: Dagster takes each name once in a code location.
        name=f"{asset.to_python_identifier()}_{in_order}_and_once",
        specs=[
            AssetCheckSpec(in_order, asset=asset, description="Each key's events are in the order of their emission."),
            AssetCheckSpec(exactly_once, asset=asset, description="Each event is on its topic once."),
        ],
        can_subset=True,
        required_resource_keys={resource_key, *([spark] if spark else [])},
    )
    def events(context: AssetCheckExecutionContext) -> Iterator[AssetCheckResult]:
        settings = _settings(context, resource_key)
        wanted = {key.name for key in context.selected_asset_check_keys}
        try:
            left = wait_until_drained(settings, drain_seconds)  # Checks run in any order, or in parallel.
            verdicts, by_spark = _judged(context, settings, topics, spark)
        except OutboxError as error:
            judged = unanswered(error)
            found = {in_order: judged, exactly_once: judged}
            counted = {}
        else:
            found = {in_order: _order(verdicts, left), exactly_once: _once(verdicts, left, settings.delivery)}
            counted = _counted(verdicts, by_spark=by_spark)
        for name in sorted(wanted):
            outcome = result(found[name], counted)
            yield outcome._replace(check_name=name, asset_key=asset)

    return events


def wait_until_drained(settings: Settings, seconds: float) -> int:
    """Wait until all rows that are there now have left; returns how many have not within `seconds`.

    Raises:
        ServerRefused, SchemaMissing: Postgres does not let us look, such as while another session locks the table.
    """
    deadline = time.monotonic() + seconds
    longest = min(seconds + COUNT_SECONDS, LONGEST_STATEMENT_SECONDS)
    with errors_as_refusals(settings), closing(connect(settings, purpose="outbox check")) as connection:

        def count(last: int | None) -> tuple[int, int | None]:
            with connection.transaction():  # So that the time limit does not stay in a pooler's session.
                connection.execute(
                    statement("window", "limit_duration", settings.table), {"milliseconds": int(longest * 1000)}
                )
                table = with_schema(connection, settings.table)
                row = connection.execute(statement("window", "waiting", table), {"last": last}).fetchone()
            return (row[0], row[1]) if row else (0, None)

        try:
            waiting, last = count(None)
            while waiting and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                waiting, _ = count(last)
        except psycopg.errors.QueryCanceled:
            raise ServerRefused(
                f"the rows of {settings.table} could not be counted within {longest:.0f} s: "
                "see whether another session locks the table (pg_locks), or raise drain_seconds"
            ) from None
    return waiting


def _judged(
    context: AssetCheckExecutionContext, settings: Settings, topics: Sequence[str], spark: str | None
) -> tuple[dict[str, TopicVerdict], bool]:
    """The verdict on each topic, or by Spark one verdict on all of them; and whether Spark has read them.

    Raises:
        UserError: there are too many records, or the topics cannot be read.
        LogUnavailable: Kafka does not answer.
    """
    records = records_in(settings, topics)
    if records <= (MAX_RECORDS if spark is None else SPARK_RECORDS):
        return {topic: verify_topic(settings, topic) for topic in topics}, False
    if spark is None:
        raise UserError(
            f"nothing was judged: {', '.join(topics)} may hold {records:,} records, and this process reads at most "
            f"{MAX_RECORDS:,}: name a SparkResource by spark_resource_key, which reads any number"
        )
    from outbox_plugin.verification.on_spark import verify

    return {", ".join(topics): verify(getattr(context.resources, spark).session, settings, topics)}, True


def _settings(context: AssetCheckExecutionContext, resource_key: str) -> Settings:
    resource: OutboxResource = getattr(context.resources, resource_key)
    return resource.settings()


def _counted(verdicts: Mapping[str, TopicVerdict], *, by_spark: bool) -> Metadata:
    counted: Metadata = {
        "records": MetadataValue.int(sum(verdict.records for verdict in verdicts.values())),
        "duplicates": MetadataValue.int(sum(verdict.duplicates for verdict in verdicts.values())),
        "order_violations": MetadataValue.int(sum(verdict.order_violations for verdict in verdicts.values())),
    }
    if by_spark:  # Nothing else counts them: a 0 would be shown as if they had been looked for.
        counted["missing"] = MetadataValue.int(sum(verdict.missing for verdict in verdicts.values()))
    return counted


_BROKERS = "otherwise see that the brokers are ones that the promise holds for"
_DISORDERED = (
    "look at the records that are named: a dead letter that was retried comes behind later events of its key, and "
    f"something else than the harvester may have written to the topic; {_BROKERS}"
)
_REPEATED = (
    "look at the records that are named: a program may have emitted an event twice by one idempotency-key, as in a "
    f"retry after its commit, and something else than the harvester may have written to the topic; {_BROKERS}"
)
_AT_LEAST_ONCE = (
    "OUTBOX_DELIVERY is at-least-once, which repeats records after a failure: consumers must recognize them"
)


def _order(verdicts: Mapping[str, TopicVerdict], left: int) -> HealthResult:
    wrong = [
        f"topic {topic}: {verdict.order_violations} events came out of order "
        f"(such as {', '.join(verdict.example_violations)})"
        for topic, verdict in verdicts.items()
        if verdict.order_violations
    ]
    if wrong:
        return HealthResult(False, "; ".join(wrong), True, _DISORDERED)
    unplaced = sum(verdict.unplaced for verdict in verdicts.values())
    what = f"{SEQUENCE_HEADER}, which only events of Spark's jobs have: their order is not judged"
    return _passed(verdicts, left, "each key's in order", unplaced, what)


def _once(verdicts: Mapping[str, TopicVerdict], left: int, delivery: Delivery = "exactly-once") -> HealthResult:
    wrong = [
        f"topic {topic}: {verdict.duplicates} events came twice (such as {', '.join(verdict.example_duplicates)})"
        for topic, verdict in verdicts.items()
        if verdict.duplicates
    ]
    if wrong and delivery == "at-least-once":
        return HealthResult(False, "; ".join(wrong), False, _AT_LEAST_ONCE)
    if wrong:
        return HealthResult(False, "; ".join(wrong), True, _REPEATED)
    unnamed = sum(verdict.unnamed for verdict in verdicts.values())
    what = f"{IDEMPOTENCY_HEADER} or {SEQUENCE_HEADER}: whether they came twice is not judged"
    return _passed(verdicts, left, "each once", unnamed, what)


def _passed(verdicts: Mapping[str, TopicVerdict], left: int, how: str, lacking: int, what: str) -> HealthResult:
    """A judgement that also says what it has not proved."""
    replayed = sum(verdict.replayed for verdict in verdicts.values())
    judged = sum(verdict.records - verdict.duplicates for verdict in verdicts.values()) - lacking - replayed
    said = [f"{judged} records, {how}"] if judged or not (lacking or replayed) else []
    said += [f"emitted again by a replay ({REPLAY_HEADER}), and not judged: {replayed}"] if replayed else []
    said += [f"{left} events have not left the outbox yet, and are not judged"] if left else []
    missing = [each for verdict in verdicts.values() for each in verdict.example_missing]
    lost = sum(verdict.missing for verdict in verdicts.values())
    said += [f"{lost} are not there (such as {', '.join(missing)}): expired, or lost"] if lost else []
    said += [f"{lacking} records carry no {what}"] if lacking else []
    return HealthResult(True, "; ".join(said))
