"""`outbox bench`."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from statistics import median

import click


@click.group()
def bench() -> None:
    """Benchmarks: ratios from one run, against the servers that the settings name."""


@bench.command()
@click.option("--rows", default=300_000, show_default=True, help="Rows of backlog, about 200 bytes each.")
@click.option("--keys", default=10_000, show_default=True, help="Distinct keys.")
@click.option("--rounds", default=3, show_default=True, help="How often each is measured, in turn.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def drain(rows: int, keys: int, rounds: int, as_json: bool) -> None:
    """Drain a backlog with one warm harvester, against a bare loop (the floor)."""
    from outbox_plugin.bench import drain as benchmark
    from outbox_plugin.settings import Settings

    report = benchmark.drain(Settings(), rows, keys, rounds, lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(json.dumps({**asdict(report), "ratio": report.ratio}))
        return
    for name, runs in (("floor", report.floor), ("harvester", report.harvester)):
        speed, cpu = median(run.records_per_second for run in runs), median(run.cpu_seconds for run in runs)
        click.echo(f"{name:10} {speed:9,.0f} records/s, {cpu:.2f} CPU s per 100,000 records (median of {rounds})")
    click.echo(f"ratio      {report.ratio:9.2f} of the floor")


@bench.command()
@click.option("--seconds", default=600.0, show_default=True, help="How long it is disturbed.")
@click.option("--seed", type=int, help="Decides the faults; a new one every time by default.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def chaos(seconds: float, seed: int | None, as_json: bool) -> None:
    """Kill, pause and restart harvesters, brokers and Postgres under a steady writer, and count what became of rows.

    Starts three brokers and a Postgres of its own. Exit code 1 if anything was lost, repeated, out of order, or stuck.
    """
    from outbox_plugin.bench import chaos as benchmark

    seed = random.randrange(1_000_000) if seed is None else seed
    report = benchmark.chaos(seconds, seed, lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        click.echo(benchmark.described(report))
    if not report.clean:
        sys.exit(1)


@bench.command()
@click.option(
    "--times", default=20, show_default=True, help="How often the leader is killed, and how often terminated."
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def takeover(times: int, as_json: bool) -> None:
    """Kill and terminate the leader, and measure for how long a `read_committed` consumer gets no records."""
    from outbox_plugin.bench import takeover as benchmark
    from outbox_plugin.settings import Settings

    report = benchmark.takeover(Settings(), times, lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(json.dumps({**asdict(report), "met": report.met}))
        return
    for name, silences, targets in (
        ("kill -9", report.kills, f"{report.target_kill_median} s, {report.target_kill_worst} s"),
        ("SIGTERM", report.hand_overs, f"{report.target_hand_over_median} s"),
    ):
        click.echo(f"{name}: median {median(silences):.2f} s, worst {max(silences):.2f} s (at most: {targets})")


@bench.command()
@click.option("--partitions", default=10_000, show_default=True, help="Partitions that are held.")
@click.option("--instances", default=500, show_default=True, help="Instances that hold them.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def coordination(partitions: int, instances: int, as_json: bool) -> None:
    """Compute who holds what from its log (no server is needed), and measure what that keeps in memory."""
    from outbox_plugin.bench import coordination as benchmark

    report = benchmark.coordination(partitions, instances)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    click.echo(
        f"{report.partitions:,} partitions, {report.instances:,} instances: {report.messages:,} messages in "
        f"{report.seconds:.2f} s ({report.cpu_seconds:.2f} CPU s)"
    )
    for messages, megabytes in zip(report.lengths, report.megabytes, strict=True):
        click.echo(f"in memory after {messages:9,} messages: {megabytes:.1f} MB")
