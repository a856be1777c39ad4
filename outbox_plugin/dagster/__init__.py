"""The outbox in Dagster: resources, a sensor that keeps the harvester running, assets, checks and jobs.

The names below are imported on first use: the harvester's daemon is started from this package, and loads no Dagster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outbox_plugin.extras import hinted

if TYPE_CHECKING:
    from outbox_plugin.dagster.assets import build_harvester_asset, build_topic_assets
    from outbox_plugin.dagster.checks import build_dead_letter_check, build_health_check, build_outbox_checks
    from outbox_plugin.dagster.component import OutboxComponent
    from outbox_plugin.dagster.definitions import build_outbox_definitions
    from outbox_plugin.dagster.job_ids import job_id
    from outbox_plugin.dagster.jobs import build_outbox_jobs
    from outbox_plugin.dagster.range_config import RangeConfig
    from outbox_plugin.dagster.resources import HarvesterResource, OutboxResource
    from outbox_plugin.dagster.sensor import build_harvester_sensor
    from outbox_plugin.dagster.topic import Topic
    from outbox_plugin.dagster.topic_position import build_position_job, build_topic_check
    from outbox_plugin.dagster.topic_sensor import build_topic_sensor
    from outbox_plugin.dagster.translator import DagsterOutboxTranslator, OutboxAssetProps
    from outbox_plugin.status.health_rules import Limits

__all__ = [
    "DagsterOutboxTranslator",
    "HarvesterResource",
    "Limits",
    "OutboxAssetProps",
    "OutboxComponent",
    "OutboxResource",
    "RangeConfig",
    "Topic",
    "build_dead_letter_check",
    "build_harvester_asset",
    "build_harvester_sensor",
    "build_health_check",
    "build_outbox_checks",
    "build_outbox_definitions",
    "build_outbox_jobs",
    "build_position_job",
    "build_topic_assets",
    "build_topic_check",
    "build_topic_sensor",
    "job_id",
]

_HOME = {
    "DagsterOutboxTranslator": "translator",
    "HarvesterResource": "resources",
    "Limits": ".status.health_rules",
    "OutboxAssetProps": "translator",
    "OutboxComponent": "component",
    "OutboxResource": "resources",
    "RangeConfig": "range_config",
    "Topic": "topic",
    "build_dead_letter_check": "checks",
    "build_harvester_asset": "assets",
    "build_harvester_sensor": "sensor",
    "build_health_check": "checks",
    "build_outbox_checks": "checks",
    "build_outbox_definitions": "definitions",
    "build_outbox_jobs": "jobs",
    "build_position_job": "topic_position",
    "build_topic_assets": "assets",
    "build_topic_check": "topic_position",
    "build_topic_sensor": "topic_sensor",
    "job_id": "job_ids",
}


def __getattr__(name: str) -> Any:
    """Import a public name where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise hinted(__name__, error) from None


def __dir__() -> list[str]:
    """The public names: Dagster looks for components among them."""
    return __all__
