"""The reference location's resources, configured from the environment."""

from dagster import EnvVar

from outbox_plugin.dagster import HarvesterResource, OutboxResource
from resources.spark import SparkResource

outbox = OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))

RESOURCES = {
    "outbox": outbox,
    "harvester": HarvesterResource(outbox=outbox),
    "spark": SparkResource(),
}
