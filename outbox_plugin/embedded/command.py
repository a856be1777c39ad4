"""`outbox dev`."""

from __future__ import annotations

import threading
from pathlib import Path

import click

from outbox_plugin.embedded.stack import DEFAULT_STATE_DIR, EmbeddedStack
from outbox_plugin.threads.signals import ending_signals, stop_on


def _folder(_: click.Context, __: click.Parameter, name: str) -> Path:
    """The folder of that name. An empty name, as of a variable that is not set, would be the working directory."""
    if not name:
        raise click.BadParameter("expected the name of a folder (given: '').")
    return Path(name)


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False),
    callback=_folder,
    default=str(DEFAULT_STATE_DIR),
    show_default=True,
    help="The folder that the servers keep their data in.",
)
def dev(state_dir: Path) -> None:
    """Run a Postgres and a Kafka on this machine until SIGTERM, SIGHUP or Ctrl-C, and say how to reach them."""
    stop = threading.Event()
    stop_on(ending_signals(), stop)
    with EmbeddedStack(state_dir, lambda line: click.echo(line, err=True)) as endpoints:
        click.echo(f"export OUTBOX_DSN={endpoints.dsn}")
        click.echo(f"export OUTBOX_BOOTSTRAP_SERVERS={endpoints.bootstrap_servers}")
        click.echo("# ready; Ctrl-C ends both servers, their data stays", err=True)
        stop.wait()
