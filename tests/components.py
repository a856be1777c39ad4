"""Loads the component for tests: in a defs folder that Dagster makes, and as the schema that `dg` reads."""

from __future__ import annotations

from typing import Any

from dagster import Definitions
from dagster.components.core.snapshot import get_package_entry_snap
from dagster.components.testing import create_defs_folder_sandbox
from dagster_shared.serdes.objects import EnvRegistryKey

from outbox_plugin.dagster import OutboxComponent


def loaded(*attributes: dict[str, Any]) -> Definitions:
    """The definitions of a code location that has one component for each of `attributes`."""
    with create_defs_folder_sandbox() as sandbox:
        for each in attributes:
            sandbox.scaffold_component(
                component_cls=OutboxComponent,
                defs_yaml_contents={"type": "outbox_plugin.dagster.OutboxComponent", "attributes": each},
            )
        with sandbox.build_all_defs() as definitions:
            return definitions


def component_schema() -> dict[str, Any]:
    """The JSON schema of the component's attributes, which `dg check yaml` applies and editors show."""
    key = EnvRegistryKey("outbox_plugin.dagster", "OutboxComponent")
    schema = get_package_entry_snap(key, OutboxComponent).component_schema
    assert schema
    return schema
