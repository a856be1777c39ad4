"""The command line `outbox`: arguments in, one call, an exit code out."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import click

from outbox_plugin.errors import InvalidSetting, OutboxError, UserError
from outbox_plugin.extras import what_to_install
from outbox_plugin.printable import printable

if TYPE_CHECKING:
    from outbox_plugin.settings import Settings

# Commands in the packages of what they start. They are imported on use: importing takes time, or needs an extra.
_LAZY_COMMANDS = {
    "bench": "outbox_plugin.bench.command:bench",
    "consumers": "outbox_plugin.coordination.command:consumers",
    "dead-letters": "outbox_plugin.operate.command:dead_letters",
    "debezium": "outbox_plugin.debezium.command:debezium",
    "dev": "outbox_plugin.embedded.command:dev",
    "grants": "outbox_plugin.access.command:grants",
    "inbox": "outbox_plugin.inbox.command:inbox",
    "parked": "outbox_plugin.operate.command:parked",
    "pause": "outbox_plugin.operate.command:pause",
    "replay": "outbox_plugin.operate.command:replay",
    "resume": "outbox_plugin.operate.command:resume",
    "status": "outbox_plugin.status.command:status",
    "verify": "outbox_plugin.verification.command:verify",
}
# What is raised where the output is written to a full disk. Where a pipe is closed, click ends the command itself.
_OUTPUT_FAILS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_LINE_BREAK = re.compile(r"\s*\n\s*")


class _Commands(click.Group):
    """The group of all commands, including those in other modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LAZY_COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _LAZY_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = _LAZY_COMMANDS[cmd_name].partition(":")
        try:
            command: click.Command = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if (hint := what_to_install(f"`outbox {cmd_name}`", error)) is None:
                raise
            return _not_installed(cmd_name, hint)
        return command


def _not_installed(command: str, hint: str) -> click.Command:
    """A placeholder for a command whose extra is not installed: it is listed, and says what to install."""

    def refuse(**_: object) -> None:
        raise UserError(hint)

    return click.Command(
        command,
        callback=refuse,
        params=[click.Argument(["anything"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        help=f"Not installed: {hint.partition(': ')[2]}.",
        add_help_option=False,
    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="outbox-plugin")
@click.pass_context
def outbox(context: click.Context) -> None:
    """A transactional outbox for Postgres and Kafka.

    Settings come from the environment (OUTBOX_DSN, OUTBOX_BOOTSTRAP_SERVERS, …) or a .env file.
    """
    from outbox_plugin import logs
    from outbox_plugin.settings import LogSettings

    logs.configure(LogSettings(), logs.to_stderr(), "INFO" if context.invoked_subcommand == "harvest" else "WARNING")


_WAKE_UP_NOTES = {True: "; writers wake its harvesters", False: "; writers do not wake its harvesters", None: ""}


@outbox.command()
@click.option("--wake-up/--no-wake-up", default=None, help="Install, or remove, the trigger that wakes harvesters.")
@click.option("--sql", "as_sql", is_flag=True, help="Change nothing; print the SQL, for somebody else to run.")
def migrate(wake_up: bool | None, as_sql: bool) -> None:
    """Create or upgrade the outbox's tables; safe to run twice, or by two at once."""
    from outbox_plugin.schema.migrate import migrate
    from outbox_plugin.schema.migration_script import migration_sql
    from outbox_plugin.schema.outboxes import present_outboxes

    for settings in present_outboxes(_settings()):
        if as_sql:
            click.echo(migration_sql(settings, wake_up=wake_up))
            continue
        applied = migrate(settings, wake_up=wake_up)
        done = f"applied to {settings.table}: {', '.join(applied)}" if applied else f"{settings.table} is up to date"
        click.echo(done + _WAKE_UP_NOTES[wake_up])


@outbox.command()
@click.option(
    "--adopt",
    is_flag=True,
    help="Take over a group whose outbox is gone for good, or an outbox whose group no longer runs; change the "
    "delivery; go on although the last progress record is lost, so that rows may be published twice.",
)
@click.option(
    "--listen",
    metavar="[HOST:]PORT",
    help="Serve /metrics, /readyz and /livez at this address, as OUTBOX_LISTEN does; without a host, at 127.0.0.1.",
)
def harvest(adopt: bool, listen: str | None) -> None:
    """Relay the outbox to Kafka until SIGTERM, SIGINT or SIGHUP; then hand over to another harvester."""
    from outbox_plugin.harvester import Harvester, look_for_cycles_less_often
    from outbox_plugin.tenants import TenantHarvesters
    from outbox_plugin.threads.background import run_together
    from outbox_plugin.threads.signals import ending_signals, stop_on

    stop = threading.Event()
    stop_on(ending_signals(), stop)
    look_for_cycles_less_often()
    outboxes = _settings(listen=listen).each()
    for settings in outboxes:
        if settings.tenants_rest is not None and not settings.names_many:
            raise InvalidSetting(
                f"OUTBOX_TENANTS_REST: only outboxes that OUTBOX_TABLE matches by a * rest (given: {settings.table!r})"
            )
    services = [(TenantHarvesters if each.names_many else Harvester)(each, adopt=adopt) for each in outboxes]
    run_together(services, stop)


def _settings(**given: str | None) -> Settings:
    """The environment's settings. Those that are `given`, and not None, take precedence."""
    from outbox_plugin.settings import Settings

    return Settings(**{name: value for name, value in given.items() if value is not None})


def main() -> None:
    """Run the command line. An error that the user can fix is one line, and exit code 2."""
    try:
        _check_encoding(sys.argv[1:])
        sys.exit(outbox.main(standalone_mode=False))
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _refuse(_LINE_BREAK.sub(" ", error.format_message()))
        sys.exit(2)
    except OutboxError as error:
        _refuse(str(error))
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (hint := what_to_install("this command", error)) is None:
            raise
        _refuse(hint)
        sys.exit(UserError.exit_code)
    except OSError as error:
        if error.errno not in _OUTPUT_FAILS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would fail again when it writes the rest at its end.
        _refuse(f"the output cannot be written: {error.strerror}; if the command changes something, that may be done")
        sys.exit(UserError.exit_code)
    except UnicodeEncodeError as error:
        if error.encoding == sys.getfilesystemencoding():
            raise
        _refuse(f"the output cannot be written in {error.encoding}: set PYTHONIOENCODING=utf-8")
        sys.exit(UserError.exit_code)


def _check_encoding(arguments: Sequence[str]) -> None:
    """Raises UserError if one of the arguments is no text: neither server, and no file of ours, could take it."""
    for each in arguments:
        if not each.isascii() and any("\ud800" <= character <= "\udfff" for character in each):
            raise UserError(f"expected arguments in {sys.getfilesystemencoding().upper()} (given: {each!r})")


def _refuse(message: str) -> None:
    """Print on standard error why the command ends; if the log is JSON, as an event of it."""
    from outbox_plugin import logs

    if logs.is_json():
        logs.logger.error("%s", message)
        return
    with suppress(OSError):  # If nobody reads it, or the disk is full, the exit code is enough.
        click.echo(f"outbox: {printable(message)}", err=True)
