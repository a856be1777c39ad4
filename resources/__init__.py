"""The reference location's resources, configured from the environment."""

from dagster import EnvVar

from outbox_plugin.dagster import HarvesterResource, OutboxResource
from outbox_plugin.dagster.spark import SparkResource

outbox = OutboxResource(dsn=EnvVar("OUTBOX_DSN"), bootstrap_servers=EnvVar("OUTBOX_BOOTSTRAP_SERVERS"))

RESOURCES = {
    "outbox": outbox,
    "harvester": HarvesterResource(outbox=outbox),
    "spark": SparkResource(conf={"spark.sql.shuffle.partitions": "4"}),
}
