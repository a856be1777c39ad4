"""`outbox verify`: reads topics, in this process or with Spark, and prints the verdict."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.core.headers import SEQUENCE_HEADER
from outbox_plugin.emit.event import TOPIC_PATTERN
from outbox_plugin.errors import LogUnavailable, ServerRefused, UserError
from outbox_plugin.printable import printable
from outbox_plugin.settings import Settings
from outbox_plugin.threads.signals import ending_signals, exit_on, on_the_terminal
from outbox_plugin.verification.topic_reader import MAX_RECORDS, Advance, records_in, verify_topics

if TYPE_CHECKING:
    from outbox_plugin.verification.verdict import TopicVerdict

SPARK_RECORDS = 1_000_000  # More are verified with Spark, if installed: it uses all cores, and disk beside memory.


@click.command()
@click.argument("topics", nargs=-1, required=True)
@click.option("--job", help="Only the events of this Spark job, or of this streaming query.")
@click.option("--master", help="Spark's master; without it, small topics are verified without Spark.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(topics: tuple[str, ...], job: str | None, master: str | None, as_json: bool) -> None:
    """Verify TOPICS of any size: each event once, and of Spark's jobs each key in order, and none missing.

    Name all topics that the jobs emitted to. Exit code 1 if anything is wrong, or if there is nothing to verify.
    """
    settings = Settings()
    for topic in topics:
        if not re.fullmatch(TOPIC_PATTERN, topic):
            raise UserError(f"expected a topic's name of 1 to 249 letters, digits, dots, _ and - (given: {topic!r})")
    try:
        verdict = _verify(settings, topics, job, master)
    except LogUnavailable as error:  # Not exit code 1, which means that a topic is wrong.
        raise ServerRefused(str(error)) from None
    complete = verdict.complete and verdict.records > 0
    click.echo(json.dumps({**asdict(verdict), "complete": complete}) if as_json else _described(verdict))
    if not verdict.records:
        click.echo(f"outbox: {printable(_nothing_found(topics, job))}", err=True)
    if not complete:
        sys.exit(1)


def _nothing_found(topics: tuple[str, ...], job: str | None) -> str:
    what = "no records" if job is None else f"no records of the job {job!r}"
    return f"nothing was verified: {', '.join(topics)} {'holds' if len(topics) == 1 else 'hold'} {what}"


def _verify(settings: Settings, topics: tuple[str, ...], job: str | None, master: str | None) -> TopicVerdict:
    """Verify with Spark if a master is given or there are many records, else in this process.

    Args:
        settings: name Kafka and Postgres.
        topics: their names.
        job: verify only this job's records.
        master: Spark's master; with None, the number of records decides.

    Raises:
        UserError: a server cannot be reached; there are too many records and Spark is not available; or a master is
            given, and there is no Java for Spark.
        LogUnavailable: Kafka does not answer.
    """
    if not master:
        KafkaAdmin.at_start(settings).close()
    records = None if master else records_in(settings, topics)
    if records is None or (records > SPARK_RECORDS and _is_spark_available()):
        return _verify_with_spark(settings, topics, job, master or "local[*]")
    if records > MAX_RECORDS:
        raise UserError(
            f"the topics hold up to {records:,} records, and at most {MAX_RECORDS:,} can be verified without Spark: "
            "install outbox-plugin[spark], and Java 17 or newer"
        )
    with _progress(records) as advance:
        return verify_topics(settings, topics, job=job, advance=advance)


def _is_spark_available() -> bool:
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401

        _java_home()
    except (ModuleNotFoundError, ServerRefused):
        return False
    return True


def _java_home() -> str:
    """The home of a Java that Spark can start on.

    Raises:
        ServerRefused: there is none. Its exit code is not 1, which means that a topic is wrong.
    """
    from outbox_plugin.embedded.java import spark_java_home
    from outbox_plugin.embedded.server import ServerFailed

    try:
        return str(spark_java_home())
    except ServerFailed as error:
        raise ServerRefused(str(error)) from None


def _verify_with_spark(settings: Settings, topics: tuple[str, ...], job: str | None, master: str) -> TopicVerdict:
    import pyarrow  # noqa: F401 Fails before a session starts if the extra is not installed.

    from outbox_plugin.spark.session import spark_session
    from outbox_plugin.verification.on_spark import verify

    with spark_session(master, java_home=_java_home()) as spark:
        return verify(spark, settings, topics, job=job)


@contextmanager
def _progress(records: int) -> Iterator[Advance]:
    """Show a progress bar on standard error, if that is a terminal, until all is read."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), "records", TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with exit_on(ending_signals()), on_the_terminal(bar):
        task = bar.add_task("", total=records)
        yield lambda passed: bar.advance(task, passed)


def _described(verdict: TopicVerdict) -> str:
    lines = [f"records: {verdict.records}"]
    for name, count, examples in (
        ("duplicates", verdict.duplicates, verdict.example_duplicates),
        ("order violations", verdict.order_violations, verdict.example_violations),
        ("missing", verdict.missing, verdict.example_missing),
    ):
        lines.append(f"{name}: {count}" + (f", such as {'; '.join(examples)}" if examples else ""))
    if verdict.replayed:
        lines.append(f"not checked, as `outbox replay` has emitted them again: {verdict.replayed}")
    if verdict.unnamed:
        lines.append(f"not checked for duplicates, as no header names the event: {verdict.unnamed}")
    if verdict.unplaced:
        only = f"only events of Spark's jobs have the header {SEQUENCE_HEADER}"
        lines.append(f"not checked for order, as {only}: {verdict.unplaced}")
    return "\n".join(map(printable, lines))
