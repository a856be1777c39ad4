"""`outbox status`: the outbox and its harvesters as text, JSON, a check, or a table that is kept up to date."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outbox_plugin.adapters.kafka_clients import check_properties
from outbox_plugin.errors import UserError
from outbox_plugin.finite_range import FiniteRange
from outbox_plugin.printable import printable
from outbox_plugin.schema.outboxes import by_name, present_outboxes
from outbox_plugin.settings import Settings
from outbox_plugin.status.health_rules import Limits, health
from outbox_plugin.status.reader import ShardStatus, Status, read_status
from outbox_plugin.threads.signals import ending_signals, exit_on, on_the_terminal

WATCH_SECONDS = 2.0
_READS_AT_ONCE = 16
_LAG_SECONDS = Limits().lag_warn_seconds

ByTable = Mapping[str, Status]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--check", is_flag=True, help="Exit code 1 also if a shard has no leader, reports trouble, is paused, or is late."
)
@click.option("--watch", is_flag=True, help="Refresh the display every two seconds, until Ctrl-C.")
@click.option(
    "--lag-seconds",
    type=FiniteRange(min=0.0),
    default=_LAG_SECONDS,
    show_default=True,
    help="For --check: the longest time that the oldest row may have waited.",
)
def status(*, as_json: bool, check: bool, watch: bool, lag_seconds: float) -> None:
    """Show backlog, leader and troubles.

    Exit code 1 when a server does not answer, or when something on the leader topic is ignored.
    """
    if watch and (as_json or check):
        raise UserError("--watch cannot be combined with --json or --check")
    if watch and not sys.stdout.isatty():
        raise UserError("--watch needs a terminal; use --json in scripts")
    outboxes = by_name(present_outboxes(Settings()))
    for settings in outboxes.values():
        check_properties(settings)

    def read() -> ByTable:
        # Servers that are away cost the time of one.
        with ThreadPoolExecutor(min(len(outboxes), _READS_AT_ONCE)) as pool:
            return dict(zip(outboxes, pool.map(read_status, outboxes.values()), strict=True))

    if watch:
        _keep_showing(read)
        return
    found = read()
    click.echo(_as_json(found) if as_json else described(found))
    failures = _failures(found, Limits(lag_seconds, lag_seconds)) if check else []
    for failure in failures:
        click.echo(f"outbox: {printable(failure)}", err=True)
    ignored = any(shard.ignored_records for each in found.values() for shard in each.shards)
    if failures or ignored or any(each.errors for each in found.values()):
        sys.exit(1)


def _failures(found: ByTable, limits: Limits) -> list[str]:
    """What is wrong with each outbox, and what to do about it; with its table if there are several outboxes."""
    judged = {table: health(each, limits) for table, each in found.items()}
    return [
        (f"table {table}: " if len(found) > 1 else "") + f"{each.explanation}: {each.what_to_do}"
        for table, each in judged.items()
        if not each.passed
    ]


def _as_json(found: ByTable) -> str:
    """One outbox's status, or all of them by their tables."""
    values = {table: each.to_json() for table, each in found.items()}
    [*one] = values.values()
    return json.dumps(one[0] if len(one) == 1 else values, indent=2)


def described(found: ByTable) -> str:
    """Some lines of text for each outbox; with its table if there are several outboxes."""
    return "\n".join((f"{table}\n" if len(found) > 1 else "") + _described(each) for table, each in found.items())


def _described(status: Status) -> str:
    lines = [
        _waiting(status),
        *_at_rest(status),
        *(line for shard in status.shards for line in _shard_lines(shard)),
        *_refused(status),
    ]
    return "\n".join(printable(line) for line in [*lines, *(f"error: {error}" for error in status.errors)])


def _waiting(status: Status) -> str:
    about = "about " if status.backlog_is_estimated else ""
    rows = "unknown" if status.backlog is None else f"{about}{status.backlog} rows"
    oldest = "" if status.oldest_seconds is None else f", the oldest waits for {status.oldest_seconds:.1f} s"
    return f"backlog: {rows}{oldest}"


def _at_rest(status: Status) -> list[str]:
    return ["at rest: a leader is elected when there are rows"] if status.is_at_rest else []


def _shard_lines(shard: ShardStatus) -> list[str]:
    lines = [f"shard {shard.shard}: no leader is heard"]
    if leader := shard.leader:
        who = f"{leader.instance} (pid {leader.pid} on {leader.host}) since {leader.since}"
        lines = [
            f"shard {shard.shard}: led by {who}, term {leader.leader_id}",
            f"  {shard.records_per_second:.0f} records/s, {shard.published} published since it started",
        ]
        if shard.recovered_rows:
            lines.append(f"  {shard.recovered_rows} rows were published by the leader before it, and not repeated")
    if shard.live_first:
        lines.append(f"  {_live_first(shard)}")
    if shard.paused:
        lines.append("  paused: see `outbox resume`")
    if shard.trouble:
        lines.append(f"  trouble: {shard.trouble}")
    return lines


def _live_first(shard: ShardStatus) -> str:
    return f"new rows go before the backlog; {shard.live_rows_waiting} wait for it, as their keys may be in it"


def _refused(status: Status) -> list[str]:
    lines = []
    if status.parked_keys:
        first = status.parked[0]
        why = f"topic {first.topic}, {first.ordering_key.description}: {first.reason}"
        lines.append(f"parked: {status.parked_keys} ({why}); see `outbox parked`")
    if status.dead_letters:
        lines.append(f"dead letters: {status.dead_letters}; see `outbox dead-letters`")
    return lines


def _keep_showing(read: Callable[[], ByTable]) -> None:
    """Show the status, and refresh it every two seconds, until Ctrl-C."""
    console = Console()
    with suppress(KeyboardInterrupt), exit_on(ending_signals()):
        with on_the_terminal(console.status("asking Postgres and Kafka")):
            found = read()
        live = Live(screen(found, time.localtime()), console=console, screen=True, auto_refresh=False)
        with on_the_terminal(live):
            live.refresh()
            while True:
                time.sleep(WATCH_SECONDS)
                live.update(screen(read(), time.localtime()), refresh=True)


def screen(found: ByTable, now: time.struct_time) -> RenderableType:
    """What a terminal shows for each outbox: its backlog, a table of its shards, and what is wrong."""
    title = Text(f"outbox status, {time.strftime('%H:%M:%S', now)}; Ctrl-C ends it", style="dim")
    return Group(title, *(part for table, each in found.items() for part in _parts(table, each)))


def _parts(table: str, status: Status) -> list[RenderableType]:
    shards = Table(title=printable(f"{table}: {_waiting(status)}"), title_justify="left", title_style="bold")
    shards.add_column("shard", justify="right")
    shards.add_column("leader")
    for name in ("records/s", "published", "waiting"):
        shards.add_column(name, justify="right")
    shards.add_column("trouble", style="red")
    for shard in status.shards:
        shards.add_row(*_cells(shard), style="" if shard.leader else "yellow")
    rest = [Text(line, style="dim") for line in _at_rest(status)]
    wrong = [*_refused(status), *(f"error: {error}" for error in status.errors)]
    return [Text(""), shards, *rest, *(Text(printable(line), style="red") for line in wrong)]


def _cells(shard: ShardStatus) -> list[Text]:
    leader = shard.leader
    who = f"{leader.instance} on {leader.host}, pid {leader.pid}" if leader else "none is heard"
    trouble = "; ".join(filter(None, ["paused" if shard.paused else None, shard.trouble]))
    waiting = f"{shard.lag_records:,}" + (f" ({shard.live_rows_waiting:,} live)" if shard.live_first else "")
    texts = [shard.shard, who, f"{shard.records_per_second:,.0f}", f"{shard.published:,}", waiting]
    return [Text(printable(str(text))) for text in (*texts, trouble)]
