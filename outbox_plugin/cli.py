"""The command line `outbox`: arguments in, one call, an exit code out."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

import click

from outbox_plugin.errors import OutboxError, UserError

if TYPE_CHECKING:
    from outbox_plugin.settings import Settings
    from outbox_plugin.status import Status

# Commands that live with what they start; imported on use, because each needs an extra of its own or much time.
_ELSEWHERE = {
    "bench": "outbox_plugin.bench.command:bench",
    "dev": "outbox_plugin.embedded.command:dev",
}


class _Commands(click.Group):
    """The group of all commands, those in other modules included."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, name = _ELSEWHERE[cmd_name].partition(":")
        try:
            command: click.Command = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            return _not_installed(cmd_name, error.name or module)
        return command


def _not_installed(command: str, module: str) -> click.Command:
    """Stands for a command whose extra is not installed: it is listed, and says what it needs."""

    def refuse(**_: object) -> None:
        raise UserError(f"`outbox {command}` needs the module {module}: install outbox-plugin[all]")

    return click.Command(command, callback=refuse, help="Needs outbox-plugin[all].", add_help_option=False)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="outbox-plugin")
def outbox() -> None:
    """A transactional outbox for Postgres and Kafka.

    Settings come from the environment (OUTBOX_DSN, OUTBOX_BOOTSTRAP_SERVERS, …) or a .env file.
    """


@outbox.command()
def migrate() -> None:
    """Create or upgrade the outbox's tables; safe to run twice, and by two at once."""
    from outbox_plugin.schema.migrate import migrate

    settings = _settings()
    applied = migrate(settings)
    click.echo(f"applied to {settings.table}: {', '.join(applied)}" if applied else f"{settings.table} is up to date")


@outbox.command()
@click.option(
    "--adopt",
    is_flag=True,
    help="Take over a group whose outbox is gone for good, or an outbox whose group runs no more.",
)
def harvest(adopt: bool) -> None:
    """Relay the outbox to Kafka until SIGTERM or SIGINT; then hand over."""
    from outbox_plugin.harvester import Harvester

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    Harvester(_settings(), adopt=adopt).run(stop)


@outbox.command()
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def status(as_json: bool) -> None:
    """Show backlog, leader and troubles. Exit code 1 when a server does not answer."""
    from outbox_plugin.status import read_status

    found = read_status(_settings())
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else _described(found))
    if found.errors:
        sys.exit(1)


def _described(status: Status) -> str:
    backlog = "unknown" if status.backlog is None else f"{status.backlog} rows"
    oldest = "" if status.oldest_seconds is None else f", the oldest waits for {status.oldest_seconds:.1f} s"
    lines = [f"backlog: {backlog}{oldest}"]
    for shard in status.shards:
        if shard.leader:
            who = f"{shard.leader.instance} (pid {shard.leader.pid} on {shard.leader.host}) since {shard.leader.since}"
            lines.append(f"shard {shard.shard}: led by {who}, term {shard.leader.leader_id}")
            lines.append(f"  {shard.records_per_second:.0f} records/s, {shard.published} published since it started")
        else:
            lines.append(f"shard {shard.shard}: no leader is heard")
        if shard.trouble:
            lines.append(f"  trouble: {shard.trouble}")
    return "\n".join([*lines, *(f"error: {error}" for error in status.errors)])


def _settings() -> Settings:
    from outbox_plugin.settings import Settings

    return Settings()


def main() -> None:
    """Run the command line; what a user can mend is one line and exit code 2."""
    try:
        sys.exit(outbox.main(standalone_mode=False))
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        click.echo(f"outbox: {error.format_message()}", err=True)
        sys.exit(2)
    except OutboxError as error:
        click.echo(f"outbox: {error}", err=True)
        sys.exit(error.exit_code)
