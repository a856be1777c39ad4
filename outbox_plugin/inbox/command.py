"""`outbox inbox`: look at dead letters, have them tried again, or discard them."""

from __future__ import annotations

import json

import click

from outbox_plugin.dead_letter_ids import ROW_ID, all_were_there
from outbox_plugin.errors import UserError
from outbox_plugin.inbox.dead_letters import MAX_SHOWN, DeadLetters, InboxDeadLetter, exception_line
from outbox_plugin.printable import printable
from outbox_plugin.settings import Settings


@click.group()
def inbox() -> None:
    """Dead letters: the events that a consumer group gave up on."""


@inbox.command("list")
@click.option("--group", help="Of this consumer group alone.")
@click.option("--json", "as_json", is_flag=True, help="For machines; with the whole error.")
def list_letters(group: str | None, as_json: bool) -> None:
    """List dead letters, the oldest first."""
    letters = DeadLetters(Settings()).list(group)
    if as_json:
        click.echo(json.dumps([each.to_json() for each in letters], indent=2))
        return
    for letter in letters:
        click.echo(printable(_described(letter)))
    more = " (the oldest; there may be more)" if len(letters) == MAX_SHOWN else ""
    click.echo(f"{len(letters)} dead letters{more}")


@inbox.command()
@click.argument("ids", nargs=-1, type=ROW_ID)
@click.option("--all", "every", is_flag=True, help="All of them, or all of the group.")
@click.option("--group", help="Of this consumer group alone.")
def retry(ids: tuple[int, ...], every: bool, group: str | None) -> None:
    """Have the group's consumers try these again, each in its key's turn."""
    wanted = _wanted(ids, every)
    asked = DeadLetters(Settings()).retry(wanted, group)
    click.echo(f"{len(asked)} dead letters are tried again as soon as a consumer of their group runs")
    all_were_there(wanted, asked)


@inbox.command()
@click.argument("ids", nargs=-1, type=ROW_ID)
@click.option("--all", "every", is_flag=True, help="All of them, or all of the group.")
@click.option("--group", help="Of this consumer group alone.")
def discard(ids: tuple[int, ...], every: bool, group: str | None) -> None:
    """Forget these for good: their events stay without effect."""
    wanted = _wanted(ids, every)
    gone = DeadLetters(Settings()).discard(wanted, group)
    click.echo(f"{len(gone)} dead letters discarded")
    all_were_there(wanted, gone)


def _wanted(ids: tuple[int, ...], every: bool) -> list[int] | None:
    """The ids, or None for all.

    Raises:
        UserError: neither was said, or both.
    """
    if every == bool(ids):
        raise UserError("expected the ids of dead letters (see `outbox inbox list`), or --all")
    return None if every else list(ids)


def _described(letter: InboxDeadLetter) -> str:
    key = "" if letter.key is None else f" key {letter.key.decode('utf-8', 'backslashreplace')!r}"
    where = f"{letter.topic}/{letter.partition}/{letter.offset}{key}"
    tried = f"{letter.attempts} attempts until {letter.failed_at:%F %T%z}"
    again = ", is being tried again" if letter.retry_at else ""
    return f"{letter.id}  {letter.group}  {where}, {tried}{again}: {exception_line(letter.error)}"
