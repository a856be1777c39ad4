"""`outbox dev`."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from outbox_plugin.embedded.stack import DEFAULT_STATE_DIR, EmbeddedStack


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="The folder that the servers keep their data in.",
)
def dev(state_dir: Path) -> None:
    """Run a Postgres and a Kafka on this machine until SIGTERM or Ctrl-C, and say how to reach them."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with EmbeddedStack(state_dir, lambda line: click.echo(line, err=True)) as endpoints:
        click.echo(f"export OUTBOX_DSN={endpoints.dsn}")
        click.echo(f"export OUTBOX_BOOTSTRAP_SERVERS={endpoints.bootstrap_servers}")
        click.echo("# ready; Ctrl-C ends both servers, their data stays", err=True)
        stop.wait()
