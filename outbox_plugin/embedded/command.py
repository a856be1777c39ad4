"""`outbox dev`."""

from __future__ import annotations

import threading
from pathlib import Path

import click

from outbox_plugin.embedded.stack import DEFAULT_STATE_DIR, EmbeddedStack
from outbox_plugin.threads.signals import ending_signals, stop_on


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STATE_DIR,
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
