"""The command line of an operator's commands: `outbox pause`, `resume`, `parked`, `dead-letters` and `replay`."""

from __future__ import annotations

from datetime import datetime

import click

from outbox_plugin import operate
from outbox_plugin.core.utc import in_utc_if_naive
from outbox_plugin.dead_letter_ids import ROW_ID, all_were_there
from outbox_plugin.errors import UserError
from outbox_plugin.operate.release_and_retry import discarded, retried
from outbox_plugin.printable import printable
from outbox_plugin.schema.outboxes import one_outbox
from outbox_plugin.settings import MAX_SHARDS, Settings

_OUTBOX = click.option(
    "--outbox", metavar="NAME", help="Which one, as `outbox status` names it, where the settings name several."
)
_SHARD = click.option(
    "--shard", type=click.IntRange(0, MAX_SHARDS - 1), help="One shard only, counted from 0.", metavar="INTEGER"
)


@click.command()
@_OUTBOX
@_SHARD
def pause(outbox: str | None, shard: int | None) -> None:
    """Publish no more rows until `outbox resume`, even after a restart."""
    settings = one_outbox(Settings(), outbox)
    operate.pause(settings, shard)
    click.echo(f"paused {_what(settings, shard)}")


@click.command()
@_OUTBOX
@_SHARD
def resume(outbox: str | None, shard: int | None) -> None:
    """Publish again, from where `outbox pause` stopped."""
    settings = one_outbox(Settings(), outbox)
    operate.resume(settings, shard)
    click.echo(f"resumed {_what(settings, shard)}")


def _what(settings: Settings, shard: int | None) -> str:
    return settings.table if shard is None else f"shard {shard} of {settings.table}"


@click.group()
def parked() -> None:
    """Keys that wait behind a row that Kafka refuses."""


@parked.command(name="list")
@_OUTBOX
def list_parked(outbox: str | None) -> None:
    """Show which keys wait, since when, and why."""
    keys = operate.parked_keys(one_outbox(Settings(), outbox))
    for key in keys:
        waits = f"row {key.row_id}, since {key.since:%Y-%m-%d %H:%M:%S}"
        click.echo(printable(f"topic {key.topic}, {key.ordering_key.description}: {waits}: {key.reason}"))
    if not keys:
        click.echo("nothing is parked")


@parked.command()
@_OUTBOX
@click.option("--topic", help="Only keys of this topic.")
@click.option("--key", help="Only this key.")
def release(outbox: str | None, topic: str | None, key: str | None) -> None:
    """Publish the rows of parked keys, in their order. Fix what was wrong first."""
    released = operate.release(one_outbox(Settings(), outbox), topic=topic, key=key)
    click.echo(f"released: {len(released)}")


@click.group(name="dead-letters")
def dead_letters() -> None:
    """Rows that Kafka refused, with OUTBOX_BAD_ROWS=dead-letter, and events that a Spark job dead-lettered."""


@dead_letters.command(name="list")
@_OUTBOX
def list_dead_letters(outbox: str | None) -> None:
    """List the dead letters, with the reason of each."""
    letters = operate.dead_letters(one_outbox(Settings(), outbox))
    for each in letters:
        topic = "no topic" if each.topic is None else f"topic {each.topic}"
        key = "no key" if each.key is None else f"key {each.key}"
        click.echo(printable(f"{each.id}: {topic}, {key}, {each.dead_lettered_at:%Y-%m-%d %H:%M:%S}: {each.reason}"))
    if not letters:
        click.echo("there are no dead letters")


@dead_letters.command()
@click.argument("ids", nargs=-1, type=ROW_ID)
@_OUTBOX
@click.option("--all", "every", is_flag=True, help="All of them.")
def retry(ids: tuple[int, ...], outbox: str | None, every: bool) -> None:
    """Emit dead letters again, unchanged, behind all rows that wait."""
    settings = one_outbox(Settings(), outbox)
    chosen = _chosen(ids, every)
    done = retried(settings, chosen)
    click.echo(f"to be tried again: {len(done)}")
    all_were_there(chosen, done)
    if every and (left := operate.dead_letters(settings)):
        click.echo(f"left, as they cannot be emitted as they were: {len(left)}; `outbox dead-letters list` says why")


@dead_letters.command()
@click.argument("ids", nargs=-1, type=ROW_ID)
@_OUTBOX
@click.option("--all", "every", is_flag=True, help="All of them.")
def discard(ids: tuple[int, ...], outbox: str | None, every: bool) -> None:
    """Delete dead letters for good."""
    chosen = _chosen(ids, every)
    done = discarded(one_outbox(Settings(), outbox), chosen)
    click.echo(f"discarded: {len(done)}")
    all_were_there(chosen, done)


def _chosen(ids: tuple[int, ...], every: bool) -> tuple[int, ...] | None:
    if bool(ids) == every:
        raise click.UsageError("name the dead letters by their ids, or give --all")
    return None if every else ids


@click.command()
@_OUTBOX
@click.option("--topic", help="Only events of this topic.")
@click.option("--key", help="Only events of this key.")
@click.option("--since", type=click.DateTime(), help="Published at this time or later (UTC).")
@click.option("--until", type=click.DateTime(), help="Published before this time (UTC).")
def replay(
    outbox: str | None, topic: str | None, key: str | None, since: datetime | None, until: datetime | None
) -> None:
    """Emit kept events again (OUTBOX_RETENTION), marked by the header outbox-replay."""
    if since is not None and until is not None and since >= until:
        raise UserError(f"expected --since before --until (given: {since} and {until})")
    since, until = (each and in_utc_if_naive(each) for each in (since, until))
    again = operate.replay(one_outbox(Settings(), outbox), topic=topic, key=key, since=since, until=until)
    click.echo(f"emitted again: {again}")
    if not again:
        kept = "events are kept only while harvesters run with OUTBOX_RETENTION"
        click.echo(f"outbox: no kept event matches; {kept}", err=True)
