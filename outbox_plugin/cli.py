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
from outbox_plugin.printable import printable

if TYPE_CHECKING:
    from outbox_plugin.settings import Settings
    from outbox_plugin.status import Status

# Commands that live with what they start; imported on use, because each needs an extra of its own or much time.
_ELSEWHERE = {
    "bench": "outbox_plugin.bench.command:bench",
    "consumers": "outbox_plugin.coordination.command:consumers",
    "dead-letters": "outbox_plugin.operate.command:dead_letters",
    "dev": "outbox_plugin.embedded.command:dev",
    "inbox": "outbox_plugin.inbox.command:inbox",
    "parked": "outbox_plugin.operate.command:parked",
    "pause": "outbox_plugin.operate.command:pause",
    "replay": "outbox_plugin.operate.command:replay",
    "resume": "outbox_plugin.operate.command:resume",
    "verify": "outbox_plugin.verify:verify",
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
@click.option("--wake-up/--no-wake-up", default=None, help="Install, or remove, the trigger that wakes harvesters.")
def migrate(wake_up: bool | None) -> None:
    """Create or upgrade the outbox's tables; safe to run twice, and by two at once."""
    from outbox_plugin.schema.migrate import migrate

    for settings in _settings().each():
        applied = migrate(settings, wake_up=wake_up)
        done = f"applied to {settings.table}: {', '.join(applied)}" if applied else f"{settings.table} is up to date"
        click.echo(done)


@outbox.command()
@click.option(
    "--adopt",
    is_flag=True,
    help="Take over a group whose outbox is gone for good, or an outbox whose group runs no more; change the delivery; "
    "go on where the last progress record is lost, though rows may come twice.",
)
def harvest(adopt: bool) -> None:
    """Relay the outbox to Kafka until SIGTERM or SIGINT; then hand over."""
    from outbox_plugin.background import run_together
    from outbox_plugin.harvester import Harvester, look_for_cycles_less_often

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    look_for_cycles_less_often()
    harvesters = [Harvester(settings, adopt=adopt) for settings in _settings().each()]
    run_together(harvesters, stop)


@outbox.command()
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def status(as_json: bool) -> None:
    """Show backlog, leader and troubles.

    Exit code 1 when a server does not answer, or when something on the leader topic is ignored.
    """
    from outbox_plugin.status import read_status

    found = {settings.table: read_status(settings) for settings in _settings().each()}
    if as_json:
        as_values = {table: status.to_json() for table, status in found.items()}
        [*one] = as_values.values()
        click.echo(json.dumps(one[0] if len(one) == 1 else as_values, indent=2))
    for table, status in found.items() if not as_json else ():
        click.echo((f"{table}\n" if len(found) > 1 else "") + _described(status))
    ignored = any(shard.ignored_records for status in found.values() for shard in status.shards)
    if ignored or any(status.errors for status in found.values()):
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
            if shard.recovered:
                lines.append(f"  {shard.recovered} rows were published by the leader before it, and not repeated")
        else:
            lines.append(f"shard {shard.shard}: no leader is heard")
        if shard.paused:
            lines.append("  paused: see `outbox resume`")
        if shard.trouble:
            lines.append(f"  trouble: {shard.trouble}")
    if status.parked_keys:
        first = status.parked[0]
        why = f"topic {first.topic}, {first.lane.whose}: {first.reason}"
        lines.append(f"parked: {status.parked_keys} ({why}); see `outbox parked`")
    if status.dead_letters:
        lines.append(f"dead letters: {status.dead_letters}; see `outbox dead-letters`")
    return "\n".join(printable(line) for line in [*lines, *(f"error: {error}" for error in status.errors)])


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
        click.echo(f"outbox: {printable(error.format_message())}", err=True)
        sys.exit(2)
    except OutboxError as error:
        click.echo(f"outbox: {printable(str(error))}", err=True)
        sys.exit(error.exit_code)
