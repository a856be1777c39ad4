"""`outbox verify`: what topics prove about their events, read through Spark."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from outbox_plugin.printable import printable

if TYPE_CHECKING:
    from outbox_plugin.core.verdict import Verdict


@click.command()
@click.argument("topics", nargs=-1, required=True)
@click.option("--job", help="Only the events of this Spark job, or of this streaming query.")
@click.option("--master", default="local[*]", show_default=True, help="Where Spark runs.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def verify(topics: tuple[str, ...], job: str | None, master: str, as_json: bool) -> None:
    """Judge TOPICS at any scale: each event once, each key in order, none missing.

    Name all topics that the jobs emitted to. Exit code 1 when anything is wrong.
    """
    import pyarrow  # noqa: F401 Else a user without the extra learns it late.

    from outbox_plugin.embedded.java import spark_java_home
    from outbox_plugin.settings import Settings
    from outbox_plugin.spark.session import spark_session
    from outbox_plugin.spark.verify import verify

    settings = Settings()
    with spark_session(master, java_home=str(spark_java_home())) as spark:
        verdict = verify(spark, settings, topics, job=job)
    click.echo(json.dumps({**asdict(verdict), "complete": verdict.complete}) if as_json else _described(verdict))
    if not verdict.complete:
        sys.exit(1)


def _described(verdict: Verdict) -> str:
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
