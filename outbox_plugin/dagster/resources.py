"""Dagster resources that name an outbox and its harvester."""

from __future__ import annotations

from importlib.metadata import version

from dagster import ConfigurableResource
from dagster_shared.libraries import DagsterLibraryRegistry
from pydantic import Field
from pydantic.config import JsonDict

from outbox_plugin.settings import Settings

DagsterLibraryRegistry.register("outbox-plugin", version("outbox-plugin"), is_dagster_package=False)

_SECRET: JsonDict = {"dagster__is_secret": True}  # Not shown in the UI, even where it was written out.


class OutboxResource(ConfigurableResource[Settings]):
    """An outbox: its table in Postgres, and the Kafka that its events go to.

    What is not given comes from the environment (`OUTBOX_TABLE`, …), as for the command line, then from the defaults.

    Example: `OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))`.
    """

    dsn: str = Field(
        description="Postgres URI of the database that holds the outbox. A secret: use EnvVar.",
        repr=False,
        json_schema_extra=_SECRET,
    )
    bootstrap_servers: str = Field(description="Kafka brokers, host:port, comma separated.")
    table: str | None = Field(default=None, description="The outbox table, optionally with its schema.")
    group: str | None = Field(default=None, description="What the harvesters of this outbox share.")
    kafka: dict[str, str] | None = Field(
        default=None,
        description="librdkafka properties: TLS, SASL, tuning.",
        repr=False,
        json_schema_extra=_SECRET,
    )

    def settings(self) -> Settings:
        """The settings that this resource stands for.

        Raises:
            InvalidSetting: one of them is wrong.
        """
        optional = {"table": self.table, "group": self.group, "kafka": self.kafka}
        given = {name: value for name, value in optional.items() if value is not None}
        return Settings(dsn=self.dsn, bootstrap_servers=self.bootstrap_servers, **given)


class HarvesterResource(ConfigurableResource[Settings]):
    """The harvester of an outbox, as a daemon on the host that runs the code location's sensors.

    Example: `HarvesterResource(outbox=OutboxResource(…))`.
    """

    outbox: OutboxResource = Field(description="What it relays.")
    lease_seconds: float = Field(
        default=60.0, gt=0, description="It ends when no sensor tick has renewed its lease for as long."
    )

    def settings(self) -> Settings:
        """The outbox's settings."""
        return self.outbox.settings()
