"""Dagster resources that name an outbox and its harvester."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any, Literal

from dagster import ConfigurableResource, EnvVar
from dagster_shared.libraries import DagsterLibraryRegistry
from pydantic import Field
from pydantic.config import JsonDict

from outbox_plugin.errors import InvalidSetting
from outbox_plugin.settings import Settings

DagsterLibraryRegistry.register("outbox-plugin", version("outbox-plugin"), is_dagster_package=False)

_MASK = "********"  # Dagster shows it in the place of a secret, and passes it back unchanged.
_NAMES = ("dsn", "bootstrap_servers", "table", "group", "kafka")
_SECRET: JsonDict = {"dagster__is_secret": True}  # Not shown in the UI, even where it was written out.


class OutboxResource(ConfigurableResource[Settings]):
    """An outbox: its table in Postgres, and the Kafka that its events go to.

    A setting that is not given comes from the environment (`OUTBOX_TABLE`, …), as for the command line, and then from
    the defaults. An empty text is refused when the resource is used. The code location checks, when it loads, the
    values that are written out and the variables that are set.

    Example: `OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))`.

    Raises:
        InvalidSetting: a setting is wrong.
    """

    dsn: str = Field(
        description="Postgres URI of the database that holds the outbox. A secret: use EnvVar.",
        repr=False,
        json_schema_extra=_SECRET,
    )
    bootstrap_servers: str = Field(description="Kafka brokers, host:port, comma separated.")
    table: str | None = Field(default=None, description="The outbox table, optionally with its schema.")
    group: str | None = Field(default=None, description="The name that all harvesters of this outbox share.")
    kafka: dict[str, str] = Field(
        default={},
        description="librdkafka properties: TLS, SASL, tuning.",
        repr=False,
        json_schema_extra=_SECRET,
    )

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        known = {name: _known(value) for name, value in values.items() if name in _NAMES and value is not None}
        given = {name: value for name, value in known.items() if value and value != _MASK}
        if {"dsn", "bootstrap_servers"} <= given.keys():
            Settings(**given)

    def settings(self) -> Settings:
        """The outbox's settings. A resource is one outbox, so the variable OUTBOX_OUTBOXES does not count.

        Raises:
            InvalidSetting: a setting is wrong.
        """
        if self.dsn == _MASK:
            raise InvalidSetting(
                "OUTBOX_DSN: the launchpad has put asterisks in the place of a secret; "
                "delete `resources` from the run's configuration"
            )
        given = {name: getattr(self, name) for name in _NAMES}
        if empty := [name for name, value in given.items() if value == ""]:
            raise InvalidSetting(
                f"OUTBOX_{empty[0].upper()}: the resource's {empty[0]} is empty: "
                "set the variable that it is taken from, or leave it out"
            )
        settings = Settings(outboxes=[], **{name: value for name, value in given.items() if value})
        if settings.names_many:
            raise InvalidSetting(
                f"OUTBOX_TABLE: a resource is one outbox, so name one table (given: {settings.table!r})"
            )
        return settings

    def table_name(self) -> str | None:
        """The table's name, as far as it is known when the code location loads; None for a variable that is not set."""
        name: str | None = _known(self.table) if self.table else os.environ.get("OUTBOX_TABLE", "outbox")
        return name


class HarvesterResource(ConfigurableResource[Settings]):
    """The harvester of an outbox: by default a daemon on the host that runs the code location's sensors.

    Example: `HarvesterResource(outbox=OutboxResource(…))`.
    """

    outbox: OutboxResource = Field(description="The outbox that it relays.")
    mode: Literal["supervise", "observe"] = Field(
        default="supervise",
        description="supervise: keep a daemon running on this host; observe: report on one that runs elsewhere.",
    )
    lease_seconds: float = Field(
        default=60.0, gt=0, description="Seconds without a sensor tick after which the daemon hands over and ends."
    )

    def settings(self) -> Settings:
        """The outbox's settings."""
        return self.outbox.settings()


def _known(value: Any) -> Any:
    """The value, as far as it is known when the code location loads; None for a variable that is not set there."""
    return os.environ.get(value.env_var_name) if isinstance(value, EnvVar) else value
