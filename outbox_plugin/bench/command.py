"""`outbox bench`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import psutil  # noqa: F401 - most benchmarks watch a process with it: its absence is said at once.

from outbox_plugin.finite_range import FiniteRange
from outbox_plugin.threads.signals import ending_signals, exit_on

if TYPE_CHECKING:
    from outbox_plugin.bench.temporary_outbox import Report, Tell
    from outbox_plugin.core.delivery_options import Delivery
    from outbox_plugin.settings import Settings

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COUNT = click.IntRange(min=1)
_POSITIVE = FiniteRange(min=0, min_open=True)


class Benchmarks(click.Group):
    """Commands that a signal ends in order: what they have made on the servers is dropped."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            StoreUnavailable: Postgres went away meanwhile.
        """
        from psycopg import OperationalError

        from outbox_plugin.schema.connection import is_connection_lost, went_away

        with exit_on(ending_signals()):
            try:
                return super().invoke(ctx)
            except OperationalError as error:
                if not is_connection_lost(error):
                    raise
                raise went_away(error) from None


@click.group(cls=Benchmarks)
def bench() -> None:
    """Benchmarks: ratios from one run, against the servers that the settings name."""


def _json(function: _Function) -> _Function:
    return click.option("--json", "as_json", is_flag=True, help="For machines.")(function)


def _benchmark(function: _Function) -> _Function:
    """What those of a harvester have."""
    delivery = click.option(
        "--delivery", type=click.Choice(["exactly-once", "at-least-once"]), help="In place of OUTBOX_DELIVERY."
    )
    return delivery(_json(function))


def _rounds(function: _Function) -> _Function:
    return click.option(
        "--rounds", type=_COUNT, default=3, show_default=True, help="How often each is measured, in turn."
    )(function)


def _rows(function: _Function) -> _Function:
    return click.option(
        "--rows", type=_COUNT, default=300_000, show_default=True, help="Rows of backlog, 200 bytes each."
    )(function)


def _run(benchmark: Callable[[Settings, Tell], Report], delivery: str | None, as_json: bool) -> None:
    """Run it, tell how it goes, and show what it found."""
    from outbox_plugin.settings import Settings

    settings = Settings(**({"delivery": delivery} if delivery else {}))
    _check_servers(settings)
    _show(benchmark(settings, _teller(as_json)), as_json)


def _check_servers(settings: Settings) -> None:
    """Raises ServerRefused unless both servers answer, before a benchmark begins."""
    from outbox_plugin.adapters.kafka_admin import KafkaAdmin
    from outbox_plugin.schema.connection import connect, errors_as_refusals

    with errors_as_refusals(settings):
        connect(settings).close()
    KafkaAdmin.at_start(settings).close()


def _teller(as_json: bool) -> Tell:
    """Says how it goes: on standard error, where standard output is for machines."""
    return lambda line: click.echo(line, err=as_json)


def _show(report: Report, as_json: bool) -> None:
    click.echo(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))


@bench.command()
@_rows
@click.option("--keys", type=_COUNT, default=10_000, show_default=True, help="Distinct keys.")
@_rounds
@_benchmark
def drain(rows: int, keys: int, rounds: int, delivery: str | None, as_json: bool) -> None:
    """Drain a backlog with one warm harvester, against a bare loop (the baseline)."""
    from outbox_plugin.bench.drain import against_baseline

    _run(lambda settings, tell: against_baseline(settings, rows, keys, rounds, tell), delivery, as_json)


@bench.command("hot-key")
@_rows
@_rounds
@_benchmark
def hot_key(rows: int, rounds: int, delivery: str | None, as_json: bool) -> None:
    """Drain a backlog of one single key, against one of 10,000 keys."""
    from outbox_plugin.bench.drain import hot_key

    _run(lambda settings, tell: hot_key(settings, rows, rounds, tell), delivery, as_json)


@bench.command("old-snapshot")
@_rows
@click.option(
    "--dead-rows", type=_COUNT, default=2_000_000, show_default=True, help="Deleted rows that the snapshot keeps."
)
@_rounds
@_benchmark
def old_snapshot(rows: int, dead_rows: int, rounds: int, delivery: str | None, as_json: bool) -> None:
    """Drain a backlog while an old snapshot keeps dead rows in the index, against none."""
    from outbox_plugin.bench.drain import old_snapshot

    _run(lambda settings, tell: old_snapshot(settings, rows, dead_rows, rounds, tell), delivery, as_json)


@bench.command()
@click.option("--rows", type=_COUNT, default=10_000_000, show_default=True, help="Rows of the very large backlog.")
@click.option("--reference-rows", type=_COUNT, default=300_000, show_default=True, help="Rows of the usual one.")
@click.option("--rounds", type=_COUNT, default=1, show_default=True, help="How often each is measured, in turn.")
@_benchmark
def backlog(rows: int, reference_rows: int, rounds: int, delivery: str | None, as_json: bool) -> None:
    """Drain a very large backlog, against a usual one; also shows the memory that it takes."""
    from outbox_plugin.bench.drain import big_backlog

    _run(lambda settings, tell: big_backlog(settings, rows, reference_rows, rounds, tell), delivery, as_json)


@bench.command()
@_rows
@click.option("--rounds", type=_COUNT, default=3, show_default=True, help="How many drains are measured.")
@_benchmark
def metrics(rows: int, rounds: int, delivery: str | None, as_json: bool) -> None:
    """Measure which share of a drain's CPU time metrics take."""
    from outbox_plugin.bench.metrics import metrics

    _run(lambda settings, tell: metrics(settings, rows, rounds, tell), delivery, as_json)


@bench.command()
@click.option("--seconds", type=_POSITIVE, default=30.0, show_default=True, help="How long, for each.")
@click.option("--rate", type=_POSITIVE, default=200.0, show_default=True, help="Rows per second, one a transaction.")
@_benchmark
def latency(seconds: float, rate: float, delivery: str | None, as_json: bool) -> None:
    """Measure commit to receipt under a steady writer, and the harvester's CPU, beside a bare loop (the baseline)."""
    from outbox_plugin.bench.latency import latency

    _run(lambda settings, tell: latency(settings, seconds, rate, tell), delivery, as_json)


@bench.command()
@click.option("--rows", type=_COUNT, default=3_000_000, show_default=True, help="Rows of the batch, 200 bytes each.")
@click.option("--keys", type=_COUNT, default=1_000_000, show_default=True, help="Distinct keys of the batch.")
@click.option(
    "--rate", type=_POSITIVE, default=100.0, show_default=True, help="Live events per second, one a transaction."
)
@_benchmark
def beside(rows: int, keys: int, rate: float, delivery: str | None, as_json: bool) -> None:
    """Measure live events while a batch is written and drains, against the seconds before it."""
    from outbox_plugin.bench.beside import beside

    _run(lambda settings, tell: beside(settings, rows, keys, rate, tell), delivery, as_json)


@bench.command()
@click.option("--seconds", type=_POSITIVE, default=20.0, show_default=True, help="How long a rest is.")
@click.option("--times", type=_COUNT, default=3, show_default=True, help="How many rests.")
@_benchmark
def idle(seconds: float, times: int, delivery: str | None, as_json: bool) -> None:
    """Measure what an idle harvester costs, and how fast the first row after a rest arrives."""
    from outbox_plugin.bench.idle import idle

    _run(lambda settings, tell: idle(settings, seconds, times, tell), delivery, as_json)


@bench.command()
@click.option("--count", type=_COUNT, default=10, show_default=True, help="How many outboxes.")
@click.option("--seconds", type=_POSITIVE, default=20.0, show_default=True, help="How long the rest is.")
@click.option("--times", type=_COUNT, default=20, show_default=True, help="How many first rows.")
@click.option(
    "--rows", type=_COUNT, default=50_000, show_default=True, help="Rows of all backlogs together, 200 bytes each."
)
@click.option("--rest", type=_POSITIVE, help="Let outboxes rest after so many seconds, as OUTBOX_TENANTS_REST does.")
@_benchmark
def outboxes(
    count: int, seconds: float, times: int, rows: int, rest: float | None, delivery: str | None, as_json: bool
) -> None:
    """Measure many outboxes in one harvester: at rest, first rows, small backlogs, and the takeover of all."""
    from outbox_plugin.bench.outboxes import outboxes

    _run(lambda settings, tell: outboxes(settings, count, seconds, times, rows, rest, tell), delivery, as_json)


@bench.command()
@click.option("--writers", "count", type=_COUNT, default=8, show_default=True, help="Connections that write.")
@click.option("--seconds", type=_POSITIVE, default=3.0, show_default=True, help="How long, for each.")
@click.option("--rounds", type=_COUNT, default=10, show_default=True, help="How often each is measured, in turn.")
@_benchmark
def writers(count: int, seconds: float, rounds: int, delivery: str | None, as_json: bool) -> None:
    """Let writers commit as fast as they can, with the wake-up trigger and without."""
    from outbox_plugin.bench.writers import writers

    _run(lambda settings, tell: writers(settings, count, seconds, rounds, tell), delivery, as_json)


@bench.command()
@click.option("--seconds", type=_POSITIVE, default=600.0, show_default=True, help="How long it is disturbed.")
@click.option("--seed", type=int, help="Decides the faults; a new one every time by default.")
@_benchmark
def chaos(seconds: float, seed: int | None, delivery: Delivery | None, as_json: bool) -> None:
    """Disturb harvesters, servers, networks and the table under a steady writer, and count what became of rows.

    Starts three brokers, a Postgres and its standby of its own. Exit code 1 if anything was lost, repeated, out of
    order, or stuck. Half an hour or more is a soak, with rarer faults: exit code 1 also if memory or tables grow.
    """
    from outbox_plugin.bench.chaos import chaos

    seed = random.randrange(1_000_000) if seed is None else seed
    report = chaos(seconds, seed, delivery, _teller(as_json))
    _show(report, as_json)
    if not report.clean:
        sys.exit(1)


@bench.command()
@click.option("--times", type=_COUNT, default=20, show_default=True, help="How often each fault befalls the leader.")
@_benchmark
def takeover(times: int, delivery: str | None, as_json: bool) -> None:
    """Kill, stop and cut off the leader, and measure for how long a `read_committed` consumer gets no records."""
    from outbox_plugin.bench.takeover import takeover

    _run(lambda settings, tell: takeover(settings, times, tell), delivery, as_json)


@bench.command()
@click.option("--partitions", type=_COUNT, default=10_000, show_default=True, help="Partitions that are held.")
@click.option("--instances", type=_COUNT, default=500, show_default=True, help="Instances that hold them.")
@_json
def coordination(partitions: int, instances: int, as_json: bool) -> None:
    """Compute who holds what from its log (no server is needed), and measure what that keeps in memory."""
    from outbox_plugin.bench.coordination import coordination

    _show(coordination(partitions, instances), as_json)


@bench.command()
@click.option("--records", type=_COUNT, default=60_000, show_default=True, help="Records in the topic.")
@click.option(
    "--keys", type=_COUNT, default=1_000, show_default=True, help="Distinct keys, each a row that is updated."
)
@_rounds
@click.option(
    "--concurrency", type=_COUNT, default=4, show_default=True, help="Connections, of the inbox and of the baseline."
)
@click.option("--batch", type=_COUNT, help="Handle so many at once, by one upsert; else each by an UPDATE.")
@_json
def inbox(records: int, keys: int, rounds: int, concurrency: int, batch: int | None, as_json: bool) -> None:
    """Handle a topic, one UPDATE a record, against the same SQL without an inbox (the baseline)."""
    from outbox_plugin.bench.inbox import bench_inbox

    _run(lambda settings, tell: bench_inbox(settings, records, keys, rounds, concurrency, tell, batch), None, as_json)


@bench.command()
@click.option(
    "--turns", type=_COUNT, default=150, show_default=True, help="How often each has its turn, 20 events a turn."
)
@_json
def emit(turns: int, as_json: bool) -> None:
    """Emit on each kind of connection, against a plain INSERT of the same row by hand."""
    from outbox_plugin.bench.emit import bench_emit

    _run(lambda settings, tell: bench_emit(settings, turns, tell), None, as_json)


@bench.command()
@click.option("--rows", type=_COUNT, default=1_000_000, show_default=True, help="Rows, about 200 bytes each.")
@_rounds
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
@_json
def spark(rows: int, rounds: int, master: str, as_json: bool) -> None:
    """Write with Spark's sink, against Spark's own JDBC append of the same rows."""
    from outbox_plugin.bench.spark import measure
    from outbox_plugin.embedded.java import spark_java_home
    from outbox_plugin.spark.session import spark_session

    def in_session(settings: Settings, tell: Tell) -> Report:
        with spark_session(master, java_home=str(spark_java_home())) as session:
            return measure(session, settings, rows, rounds, tell)

    _run(in_session, None, as_json)


@bench.command()
@click.option("--ticks", type=click.IntRange(min=2), default=500, show_default=True, help="How many, after a warm-up.")
@click.option("--topic", "topics", multiple=True, help="A topic whose end each tick reports; may be repeated.")
@_json
def tick(ticks: int, topics: tuple[str, ...], as_json: bool) -> None:
    """What a tick of the Dagster sensor costs, and whether many of them leave anything behind."""
    from outbox_plugin.bench.tick import tick

    _run(lambda settings, tell: tick(settings, list(topics), ticks, tell), None, as_json)
