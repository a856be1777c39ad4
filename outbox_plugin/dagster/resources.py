"""Dagster resources that name an outbox and its harvester."""

from __future__ import annotations

from importlib.metadata import version

from dagster import ConfigurableResource
from dagster_shared.libraries import DagsterLibraryRegistry
from pydantic import Field

from outbox_plugin.settings import Settings

DagsterLibraryRegistry.register("outbox-plugin", version("outbox-plugin"), is_dagster_package=False)


class OutboxResource(ConfigurableResource[Settings]):
    """An outbox: its table in Postgres, and the Kafka that its events go to.

    Example: `OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))`.
    """

    dsn: str = Field(
        description="Postgres URI of the database that holds the outbox. A secret: use EnvVar.", repr=False
    )
    bootstrap_servers: str = Field(description="Kafka brokers, host:port, comma separated.")
    table: str = Field(default="outbox", description="The outbox table, optionally with its schema.")
    group: str = Field(default="outbox", description="What the harvesters of this outbox share.")
    kafka: dict[str, str] = Field(default={}, description="librdkafka properties: TLS, SASL, tuning.", repr=False)

    def settings(self) -> Settings:
        """The settings that this resource stands for.

        Raises:
            InvalidSetting: one of them is wrong.
        """
        return Settings(
            dsn=self.dsn,
            bootstrap_servers=self.bootstrap_servers,
            table=self.table,
            group=self.group,
            kafka=self.kafka,
        )


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
