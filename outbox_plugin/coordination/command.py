"""`outbox consumers`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import click
from rich import box
from rich.console import Console
from rich.table import Table

from outbox_plugin.coordination.admin import Admin, Known
from outbox_plugin.coordination.heartbeat_timing import HEARTBEAT_INTERVAL_SECONDS
from outbox_plugin.coordination.log import TOPIC
from outbox_plugin.coordination.partition_owners import NO_END, Pause
from outbox_plugin.errors import UserError
from outbox_plugin.finite_range import FiniteRange
from outbox_plugin.printable import printable

WIDTH = 400  # Where no terminal says how wide it is: nothing is folded.
_SECONDS = FiniteRange(min=1)
NUMBERS = ("partition", "offset", "lag", "behind", "heard")


@click.group()
@click.option("--coordination-topic", default=TOPIC, show_default=True, help="Where the consumers talk.")
@click.option(
    "--heartbeat-interval",
    type=_SECONDS,
    default=HEARTBEAT_INTERVAL_SECONDS,
    show_default=True,
    help="Seconds, as the consumers have it.",
)
@click.pass_context
def consumers(context: click.Context, coordination_topic: str, heartbeat_interval: float) -> None:
    """Consumers that share topics through Kafka alone: see, pause, move and resume them."""
    # Made by the command, since its help needs no brokers.
    context.obj = partial(Admin, coordination_topic=coordination_topic, heartbeat_interval_seconds=heartbeat_interval)


@consumers.command("list")
@click.argument("group", required=False)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.pass_obj
def list_(make_admin: Callable[[], Admin], group: str | None, as_json: bool) -> None:
    """Show who holds what and how far it is behind, of GROUP or of all groups."""
    known = make_admin().world(group)
    if as_json:
        click.echo(json.dumps(_json(known), indent=2))
        return
    for name, pause in sorted(known.pauses.items()):
        click.echo(printable(f"the group {name} is paused {_until(pause)}, by {pause.by}"))
    if known.rows:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(_table(known))
    elif not known.pauses:
        click.echo("nobody has claimed anything lately")


@consumers.command()
@click.argument("group")
@click.option("--seconds", type=_SECONDS, help="Resume by itself then; else only `resume` ends it.")
@click.pass_obj
def pause(make_admin: Callable[[], Admin], group: str, seconds: float | None) -> None:
    """Have all of GROUP release what they hold, and stay released."""
    silent = make_admin().pause(group, seconds)
    for key in silent:
        silence = f"partition {key.partition} of {key.topic}: its holder was silent for two heartbeats"
        click.echo(printable(silence), err=True)
    until = "until it is resumed" if seconds is None else f"for {seconds:g} s"
    click.echo(printable(f"the group {group} is paused {until}"))


@consumers.command()
@click.argument("group")
@click.pass_obj
def resume(make_admin: Callable[[], Admin], group: str) -> None:
    """Let a paused GROUP go on."""
    make_admin().resume(group)
    click.echo(printable(f"the group {group} goes on"))


@consumers.command("set-position")
@click.argument("group")
@click.argument("topic")
@click.argument("positions", nargs=-1, required=True, metavar="PARTITION=OFFSET...")
@click.pass_obj
def set_position(make_admin: Callable[[], Admin], group: str, topic: str, positions: tuple[str, ...]) -> None:
    """Set where a paused GROUP goes on in TOPIC, such as 0=42 1=17."""
    wanted = dict(_position(topic, each) for each in positions)
    make_admin().set_position(group, wanted)
    for (_, partition), offset in wanted.items():
        goes_on = f"the group {group} goes on at {offset} in partition {partition} of {topic}, once it is resumed"
        click.echo(printable(goes_on))


def _position(topic: str, text: str) -> tuple[tuple[str, int], int]:
    partition, _, offset = text.partition("=")
    if not (partition.isdecimal() and offset.isdecimal()):
        raise UserError(f"expected PARTITION=OFFSET, two whole numbers such as 0=42 (given: {text!r})")
    return (topic, int(partition)), int(offset)


def _table(known: Known) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("group", "topic", "partition", "state", "client", "instance", "offset", "lag", "behind", "heard"):
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in known.rows:
        (group, topic, partition), state, holder, offset, heard = row
        lag = known.lags.get(row.key)
        instance_id, client_id = holder or ("", "")
        table.add_row(
            printable(group),
            printable(topic),
            str(partition),
            state,
            printable(client_id),
            printable(instance_id),
            "" if offset is None else str(offset),
            "" if lag is None else str(lag.records),
            "" if lag is None or lag.seconds is None else f"{lag.seconds:.1f} s",
            "" if heard is None else f"{heard:.1f} s ago",
        )
    return table


def _json(known: Known) -> dict[str, object]:
    return {
        "paused": {
            name: {"until": None if pause.until >= NO_END else int(pause.until), "by": pause.by}
            for name, pause in known.pauses.items()
        },
        "partitions": [
            {
                **row.key._asdict(),
                "state": row.state,
                "holder": row.holder and row.holder._asdict(),
                "offset": row.offset,
                "heard_seconds": row.heard_seconds,
                "lag_records": lag.records if lag else None,
                "lag_seconds": lag.seconds if lag else None,
            }
            for row in known.rows
            for lag in [known.lags.get(row.key)]
        ],
    }


def _until(pause: Pause) -> str:
    if pause.until >= NO_END:
        return "until it is resumed"
    return f"until {datetime.fromtimestamp(pause.until, UTC):%Y-%m-%d %H:%M:%S} UTC"
