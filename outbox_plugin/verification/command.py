"""`outbox verify`: what topics prove about their events, read in this process or through Spark."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.errors import LogUnavailable, ServerRefused, UserError
from outbox_plugin.printable import printable
from outbox_plugin.settings import Settings
from outbox_plugin.verification.topic_reader import MOST_RECORDS, Advance, records_in, verify_topics

if TYPE_CHECKING:
    from outbox_plugin.verification.verdict import TopicVerdict

SPARK_RECORDS = 1_000_000  # More are left to Spark where it is installed: it takes all cores, and disk for memory.


@click.command()
@click.argument("topics", nargs=-1, required=True)
@click.option("--job", help="Only the events of this Spark job, or of this streaming query.")
@click.option("--master", help="Where Spark runs; without it, small topics are judged without Spark.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def verify(topics: tuple[str, ...], job: str | None, master: str | None, as_json: bool) -> None:
    """Judge TOPICS at any scale: each event once, each key in order, none missing.

    Name all topics that the jobs emitted to. Exit code 1 when anything is wrong.
    """
    settings = Settings()
    try:
        verdict = _judged(settings, topics, job, master)
    except LogUnavailable as error:  # Exit code 1 is for what is wrong in a topic.
        raise ServerRefused(str(error)) from None
    click.echo(json.dumps({**asdict(verdict), "complete": verdict.complete}) if as_json else _described(verdict))
    if not verdict.complete:
        sys.exit(1)


def _judged(settings: Settings, topics: tuple[str, ...], job: str | None, master: str | None) -> TopicVerdict:
    """Judged in this process, or through Spark: where a master is named, or there are many records.

    Raises:
        UserError: a server cannot be reached, there are too many records and Spark cannot be had, or there is no Java
            for the Spark whose master is named.
        LogUnavailable: Kafka is away.
    """
    if not master:
        KafkaAdmin(settings).check_reachable()
    records = None if master else records_in(settings, topics)
    if records is None or (records > SPARK_RECORDS and _spark_can_be_had()):
        return _judged_by_spark(settings, topics, job, master or "local[*]")
    if records > MOST_RECORDS:
        raise UserError(
            f"the topics hold up to {records:,} records, and no more than {MOST_RECORDS:,} are judged without Spark: "
            "install outbox-plugin[spark], and Java 17 or newer"
        )
    with _progress(records) as advance:
        return verify_topics(settings, topics, job=job, advance=advance)


def _spark_can_be_had() -> bool:
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401

        _java_home()
    except (ModuleNotFoundError, ServerRefused):
        return False
    return True


def _java_home() -> str:
    """Of a Java that Spark can start on.

    Raises:
        ServerRefused: there is none; exit code 1 is for what is wrong in a topic.
    """
    from outbox_plugin.embedded.java import spark_java_home
    from outbox_plugin.embedded.server import ServerFailed

    try:
        return str(spark_java_home())
    except ServerFailed as error:
        raise ServerRefused(str(error)) from None


def _judged_by_spark(settings: Settings, topics: tuple[str, ...], job: str | None, master: str) -> TopicVerdict:
    import pyarrow  # noqa: F401 Else a user without the extra learns it late.

    from outbox_plugin.spark.session import spark_session
    from outbox_plugin.verification.on_spark import verify

    with spark_session(master, java_home=_java_home()) as spark:
        return verify(spark, settings, topics, job=job)


@contextmanager
def _progress(records: int) -> Iterator[Advance]:
    """A bar on standard error, where that is a terminal; gone once all is read."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), "records", TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=records)
        yield lambda passed: progress.advance(task, passed)


def _described(verdict: TopicVerdict) -> str:
    lines = [f"records: {verdict.records}"]
    for name, count, examples in (
        ("duplicates", verdict.duplicates, verdict.example_duplicates),
        ("order violations", verdict.order_violations, verdict.example_violations),
        ("missing", verdict.missing, verdict.example_missing),
    ):
        lines.append(f"{name}: {count}" + (f", such as {'; '.join(examples)}" if examples else ""))
    if verdict.unnamed:
        lines.append(f"not told from duplicates, for want of a header: {verdict.unnamed}")
    if verdict.unplaced:
        lines.append(f"not judged for order, for want of a header: {verdict.unplaced}")
    return "\n".join(map(printable, lines))
