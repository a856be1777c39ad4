"""`outbox debezium` moves an outbox from a connector of Debezium's to a harvester. The table stays."""

from __future__ import annotations

import json
from pathlib import Path

import click

from outbox_plugin.debezium.event_router import EventRouter, InvalidConnector, event_router
from outbox_plugin.debezium.switch import outbox_view
from outbox_plugin.debezium.switch import switch as change_over
from outbox_plugin.settings import Settings

_CONNECTOR = click.argument("connector", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@click.group()
def debezium() -> None:
    """Replace Debezium's outbox event router. CONNECTOR is a file with the connector's configuration, in JSON.

    OUTBOX_TABLE is the name of a new view of Debezium's table, which the harvester relays.
    """


@debezium.command()
@_CONNECTOR
def prepare(connector: Path) -> None:
    """Print the SQL that creates the view and prepares the table for it. Changes nothing, and Debezium goes on."""
    settings = Settings()
    view = outbox_view(settings, _router(connector))
    statements = view.preparation()
    for difference in view.differences:
        click.echo(f"-- Not byte for byte as before: {difference}")
    for statement in statements:
        click.echo(f"{statement.as_string()};\n".encode())  # In UTF-8, whatever the terminal's encoding is.


@debezium.command()
@_CONNECTOR
def switch(connector: Path) -> None:
    """Let the harvester relay all rows that are written from now on, and Debezium none of them.

    Create the view and migrate it first. Harvesters may run; they wait until Debezium has read its last rows.
    """
    change_over(Settings(), _router(connector), lambda line: click.echo(line, err=True))


def _router(file: Path) -> EventRouter:
    """Read the configuration. Raises InvalidConnector if it is not valid, or not supported."""
    try:
        connector = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidConnector(f"{file}: expected JSON: {error}") from None
    except RecursionError:
        raise InvalidConnector(
            f"{file}: expected a JSON object with the connector's properties (given: lists or objects, nested too deep)"
        ) from None
    if not isinstance(connector, dict):
        raise InvalidConnector(f"{file}: expected a JSON object with the connector's properties")
    try:
        return event_router(connector)
    except InvalidConnector as error:
        raise InvalidConnector(f"{file}: {error}") from None
